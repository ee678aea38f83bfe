"""The trainer's side of its workers, however they are reached: talk to them, hear of their failures, end them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any, Generic, TypeVar

import torch
from tensordict import TensorDict

from collectors.workers.hold import Hold
from collectors.workers.shared_batch import BatchPlan

GRACE = 5.0  # seconds in which a worker that was told to end has to


class Worker(ABC):
    """One worker (a ``wsync.RemoteWorker``).

    Attributes:
        worker_idx: its index.
        num_envs: its environments, once it is ready.
        frames: that a batch of its has.
        buffers: what it brings, as bytes.
        batches: ``buffers`` as TensorDicts; one is written again when the worker is told to fill that buffer again.
        hold: on its process, if this side has started one for it on this machine; else an empty one.
    """

    def __init__(self, worker_idx: int) -> None:
        self.worker_idx = worker_idx
        self.num_envs = 0
        self.frames = 0
        self.buffers: list[torch.Tensor] = []
        self.batches: list[TensorDict] = []
        self.hold = Hold(None)

    @property
    @abstractmethod
    def sentinel(self) -> int:
        """A descriptor that is readable when the worker has ended."""

    def ready(self, plan: BatchPlan, buffers: list[torch.Tensor], num_envs: int) -> None:
        """It has built its environments, and its batches will lie in ``buffers``."""
        self.num_envs, self.buffers = num_envs, buffers
        self.batches = [plan.view(buffer) for buffer in buffers]
        self.frames = plan.batch_size.numel()


W = TypeVar("W", bound=Worker)
Event = tuple[W, str, Any]
"""A worker, a word, and what goes with it."""


class Pool(ABC, Generic[W]):
    """Workers that are there, but have nothing to act with yet: they are told ``build`` first.

    A command is answered once, but for ``seed`` and ``resume``: ``build`` by ``ready``, ``connect`` by ``connected``,
    ``collect`` by ``batch``, which is in the worker's ``batches`` then. Each worker takes its commands in order.

    Attributes:
        workers: those that were not let go.
        patience: seconds in which a worker that has begun to say or to take something has to go on; None: no limit.
    """

    def __init__(self) -> None:
        self.workers: list[W] = []
        self.patience: float | None = None

    @abstractmethod
    def tell(self, workers: Collection[W], command: str, argument: Any = None) -> None:
        """Give a command; who is gone is heard of when one listens."""

    @abstractmethod
    def listen(self, workers: Collection[W], wake: int, timeout: float | None) -> list[Event[W]]:
        """What ``workers`` have said, and who of them has ended: ``(worker, "died", how)``.

        Waits until there is something, until the descriptor ``wake`` is readable, or for ``timeout`` seconds.
        """

    def begin(self, worker_idx: int) -> W:
        """Start a worker in the place of one that was let go; what it says is heard by and by.

        Raises:
            OSError: this machine cannot.
        """
        raise OSError("workers of this kind cannot be started anew")

    @abstractmethod
    def let_go(self, worker: W) -> None:
        """End a worker at once, if it has not ended, and whatever belongs to it."""

    @abstractmethod
    def close(self) -> None:
        """Let all workers end, and end those who do not. Harmless when repeated."""
