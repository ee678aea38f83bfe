"""The trainer's side of its workers, however they are reached: talk to them, hear of their failures, end them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection
from typing import Any, Generic, TypeVar

import torch
from tensordict import TensorDict

from collectors.shared_batch import BatchPlan
from wsync import WorkerDied, WorkerFailed

GRACE = 5.0  # seconds in which a worker that was told to end has to


class Worker(ABC):
    """One worker (a ``wsync.RemoteWorker``).

    Attributes:
        worker_idx: its index.
        num_envs: its environments, once it is ready.
        buffers: what it brings, as bytes.
        batches: the same, as TensorDicts; written again when the worker is told to fill that buffer again.
    """

    def __init__(self, worker_idx: int) -> None:
        self.worker_idx = worker_idx
        self.num_envs = 0
        self.buffers: list[torch.Tensor] = []
        self.batches: list[TensorDict] = []

    @property
    @abstractmethod
    def sentinel(self) -> int:
        """A descriptor that is readable when the worker has ended."""

    def ready(self, plan: BatchPlan, buffers: list[torch.Tensor], num_envs: int) -> None:
        """It has built its environments, and its batches will lie in ``buffers``."""
        self.num_envs, self.buffers = num_envs, buffers
        self.batches = [plan.view(buffer) for buffer in buffers]


W = TypeVar("W", bound=Worker)


class Pool(ABC, Generic[W]):
    """Workers that are there, but have nothing to act with yet: they are told ``build`` first.

    A command is answered once, but for ``seed``: ``build`` by ``ready``, ``connect`` by ``connected``, ``collect`` by
    ``batch``, which is in the worker's ``batches`` then. Each worker takes its commands in order.
    """

    def __init__(self) -> None:
        self.workers: list[W] = []
        self._heard: deque[tuple[W, str, Any]] = deque()

    @abstractmethod
    def tell(self, workers: Collection[W], command: str, argument: Any = None) -> None:
        """Give a command; who is gone is heard of when one listens."""

    @abstractmethod
    def _listen(self, workers: Collection[W]) -> None:
        """Wait until one of ``workers`` has answered or ended, and put that into ``_heard``."""

    @abstractmethod
    def close(self) -> None:
        """Let all workers end, and end those who do not. Harmless when repeated."""

    def hear(self, expected: str, workers: Collection[W]) -> tuple[W, Any]:
        """The next answer from one of ``workers``.

        Raises:
            WorkerFailed: one raised; carries its traceback.
            WorkerDied: one has ended.
        """
        while not self._heard:
            self._listen(workers)
        worker, kind, answer = self._heard.popleft()
        if kind == "error":
            cause = f"worker {worker.worker_idx} failed:\n{answer}"
            raise WorkerFailed(cause, {worker.worker_idx: answer})
        if kind == "died":
            raise WorkerDied(f"worker {worker.worker_idx} {answer}", {worker.worker_idx: answer})
        assert kind == expected, f"a worker answered {kind} where {expected} was due"
        return worker, answer

    def hear_all(self, expected: str) -> list[tuple[W, Any]]:
        """One answer from every worker, in the order of their indices."""
        missing, answers = set(self.workers), []
        while missing:
            worker, answer = self.hear(expected, missing)
            missing.discard(worker)
            answers.append((worker, answer))
        return sorted(answers, key=lambda pair: pair[0].worker_idx)
