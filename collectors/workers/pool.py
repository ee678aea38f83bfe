"""The trainer's interface to its workers, independent of the medium: send commands, wait for events, end workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from multiprocessing.process import BaseProcess
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from tensordict import TensorDict

from collectors.batch_layout import BatchLayout
from collectors.workers.process_handle import ProcessHandle

RAISED = ("error", "unusable")  # events of a worker that has raised
SHUTDOWN_GRACE = 5.0  # seconds in which a worker has to end after the message to end
LONGEST_POLL = 1e6  # seconds; poll(2) takes milliseconds in an int


def pollable(timeout: float | None) -> float | None:
    """Return a timeout in seconds as poll(2) can take it; None for no limit."""
    return None if timeout is None else min(timeout, LONGEST_POLL)


class WorkerHandle(ABC):
    """One worker, seen from the trainer; a ``wsync.RemoteWorker``.

    Attributes:
        worker_idx: its index.
        num_envs: number of its environments; 0 until it is ready.
        buffers: memory of its batches, one ``uint8`` tensor each.
        batches: views of ``buffers``. A batch is overwritten after the next ``collect`` command for its buffer.
        process: the worker's process, if this process has started it.
        process_handle: reaches ``process``; empty without it.
    """

    process: BaseProcess | None = None

    def __init__(self, worker_idx: int) -> None:
        self.worker_idx = worker_idx
        self.num_envs = 0
        self.buffers: list[torch.Tensor] = []
        self.batches: list[TensorDict] = []
        self.process_handle = ProcessHandle(None)

    @property
    @abstractmethod
    def sentinel(self) -> int:
        """A descriptor that is readable once the worker has ended."""

    def fileno(self) -> int:
        """Return ``sentinel``.

        A scheme takes this object in place of a process.
        """
        return self.sentinel

    def set_ready(self, layout: BatchLayout, buffers: list[torch.Tensor], num_envs: int) -> None:
        """Store what the worker reports when its environments are built."""
        self.num_envs, self.buffers = num_envs, buffers
        self.batches = [layout.view(buffer) for buffer in buffers]


class Event(NamedTuple):
    """What a worker reports.

    Attributes:
        worker: the worker.
        kind: ``ready``, ``answer``, ``connected`` or ``batch``: the answer to a command; ``error``: the worker raised
            and ends; ``unusable``: it raised ``UnusablePolicy``, and ends; ``accepted``: its connection was accepted;
            ``part``: of a batch, the rest of which is still to come; ``died``: it, or its connection, ended without a
            message; ``unplaced``: a replacement has found no place in time, and another one would not either.
        value: the buffer's index for ``batch`` and ``part``, the answer for ``answer``, a traceback for ``error`` and
            ``unusable``, the reason for ``died`` and ``unplaced``.
    """

    worker: WorkerHandle
    kind: str
    value: Any = None


W = TypeVar("W", bound=WorkerHandle)


class WorkerPool(ABC, Generic[W]):
    """Started workers. The first command for each is ``build``.

    Every command has one answer, except ``seed`` and ``resume``, which have none: ``build`` is answered by ``ready``,
    ``ask`` by ``answer``, ``connect`` by ``connected``, ``collect`` by ``batch``. A worker executes its commands in
    order.

    Methods are called by one thread at a time, which holds the collector's ``GatherLock``, except while the collector
    is being made, when there is one thread.

    Attributes:
        workers: all workers that were not discarded.
    """

    def __init__(self) -> None:
        self.workers: list[W] = []

    @abstractmethod
    def send(self, worker: W, command: str, argument: Any = None) -> None:
        """Send a command. A worker that has ended does not raise here; ``poll`` reports it."""

    @abstractmethod
    def poll(self, workers: Collection[W], wakeup_fd: int, timeout: float | None) -> list[Event]:
        """Return the events of ``workers``.

        Waits until there is one, until the descriptor ``wakeup_fd`` is readable, or for ``timeout`` seconds.
        """

    def start_worker(self, worker_idx: int) -> W:
        """Start a worker in place of a discarded one, without waiting for it.

        Raises:
            OSError: the process could not be started, or workers of this kind cannot be replaced.
        """
        raise OSError("workers of this kind cannot be restarted")

    @abstractmethod
    def discard(self, worker: W) -> None:
        """End a worker at once and release its resources."""

    @abstractmethod
    def close(self) -> None:
        """End all workers: let each finish, then kill those that exceed the grace period. Idempotent."""
