"""Workers that execute each command in a remote call (RPC, Ray): the trainer's pool, and the worker's end."""

from __future__ import annotations

import time
import traceback
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from multiprocessing.connection import wait
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from collectors.worker import RAISED, CommandExecutor
from collectors.workers.connections import milliseconds
from collectors.workers.pool import Event, WakeEvent, WorkerHandle, WorkerPool
from collectors.workers.processes import SHUTDOWN_GRACE


class Reply(NamedTuple):
    """What a call returns.

    Attributes:
        kind: as ``Event.kind``, or ``ended``; empty after a command that has no answer.
        value: as ``Event.value``; after ``ready``: layout, number of buffers, number of environments, None.
        payload: the bytes of a batch, ``uint8[nbytes]``, as the type that the calls transport without a copy.
    """

    kind: str = ""
    value: Any = None
    payload: torch.Tensor | np.ndarray | None = None


def execute(executor: CommandExecutor, command: str, argument: Any) -> Reply:
    """Execute a command in a worker; ``end`` is the last one. A worker that has raised is closed at once.

    (The trainer may drop it without another call.)
    """
    if command == "end":
        executor.close()
        return Reply("ended")
    kind, value = executor.execute(command, argument) or ("", None)
    if kind in RAISED:
        try:
            executor.close()
        except (Exception, SystemExit):  # noqa: BLE001  the trainer is told the first error
            traceback.print_exc()
    return Reply(kind, value, executor.buffers[value] if kind == "batch" else None)


class CalledWorker(WorkerHandle):
    """A worker that executes commands in calls."""

    def __init__(self, worker_idx: int) -> None:
        super().__init__(worker_idx)
        self._ended = WakeEvent()  # set when the worker or its process has ended

    @property
    def sentinel(self) -> int:
        """Readable when the worker or its process has ended."""
        return self._ended.fileno()

    @abstractmethod
    def call(self, command: str, argument: Any, on_reply: Callable[[Reply], None]) -> None:
        """Call the worker after all earlier calls.

        ``on_reply`` is called once, possibly before this returns, in any thread. The reply of a worker that
        has ended is ``died`` with the error of the call.
        """

    def exit_reason(self, error: str) -> str:
        """Return how the worker has ended, as text to follow "worker 3 ", after a call has raised ``error``."""
        return error

    def close(self) -> None:
        """Release the resources of this end."""
        self._ended.close()


C = TypeVar("C", bound=CalledWorker)


class CallPool(WorkerPool[C]):
    """Calls workers, and waits for the replies of all of them at once.

    A call to a worker that has ended is answered by ``died``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._replies: deque[tuple[C, Reply]] = deque()
        self._replied = WakeEvent()

    def send(self, worker: C, command: str, argument: Any = None) -> None:
        """Call a worker."""

        def put(reply: Reply) -> None:
            self._replies.append((worker, reply))
            self._replied.set()

        worker.call(command, argument, put)

    def poll(self, workers: Collection[C], wakeup_fd: int, timeout: float | None) -> list[Event]:
        """Return the replies of ``workers`` as events."""
        seconds = None if timeout is None else milliseconds(timeout) / 1e3
        if self._replied.fileno() not in wait([self._replied.fileno(), wakeup_fd], seconds):
            return []
        self._replied.clear()
        events: list[Event] = []
        while self._replies:
            worker, (kind, value, payload) = self._replies.popleft()
            if worker not in workers:
                continue  # it was discarded
            if kind == "ready":
                worker.set_ready(*value)
            elif payload is not None:
                np.copyto(worker.buffers[value].numpy(), np.asarray(payload))
            elif kind == "died":
                value = worker.exit_reason(value)
            if kind:
                events.append(Event(worker, kind, value))
        return events

    def _end_workers(self) -> None:
        """Have all workers close; wait until each has, has died, or has exceeded the grace period."""
        ended: SimpleQueue[Reply] = SimpleQueue()
        for worker in self.workers:
            worker.call("end", None, ended.put)
        deadline = time.monotonic() + SHUTDOWN_GRACE
        with suppress(Empty):
            for _ in self.workers:
                ended.get(timeout=max(0.0, deadline - time.monotonic()))
