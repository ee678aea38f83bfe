"""Workers that execute each command in a remote call (RPC, Ray): the trainer's pool, and the worker's end."""

from __future__ import annotations

import time
import traceback
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np
import torch

from collectors.worker import RolloutWorker, WorkerOptions, error_kind
from collectors.workers.pool import SHUTDOWN_GRACE, Event, WorkerHandle, WorkerPool, pollable
from collectors.workers.wake_event import WakeEvent


@dataclass(frozen=True)
class Reply:
    """What a call returns.

    Attributes:
        kind: as ``Event.kind``, or ``ended``; empty after a command that has no answer.
        value: as ``Event.value``; after ``ready``: layout, number of buffers, number of environments.
        payload: the bytes of a batch, ``uint8[nbytes]``, as the type that the calls transport without a copy.
    """

    kind: str = ""
    value: Any = None
    payload: torch.Tensor | np.ndarray | None = None


_NO_ANSWER = Reply()


class CommandExecutor:
    """The worker's end: executes commands, and returns errors as replies.

    After a failed command the worker is closed, and later commands have no answer.

    Args:
        configure: applies the options to this process; called before anything is built.
    """

    def __init__(self, configure: Callable[[WorkerOptions], object]) -> None:
        self._configure = configure
        self._worker: RolloutWorker | None = None
        self._buffers: list[torch.Tensor] = []
        self._failed = False

    def execute(self, command: str, argument: Any) -> Reply:
        """Execute ``build`` (spec, options), then the commands of ``RolloutWorker.execute``."""
        if self._failed:
            return _NO_ANSWER
        try:
            with ExitStack() as on_error:
                on_error.callback(self.close)  # at once: the trainer may drop the worker without another call
                reply = self._build(*argument) if self._worker is None else self._work(self._worker, command, argument)
                on_error.pop_all()
            return reply
        except (Exception, SystemExit) as error:  # noqa: BLE001  raised again in the trainer, with this traceback
            self._failed = True
            return Reply(error_kind(error), traceback.format_exc())

    def _build(self, spec: bytes, options: WorkerOptions) -> Reply:
        self._configure(options)
        self._worker = worker = RolloutWorker(spec, options)
        self._buffers = worker.layout.allocate(options.buffers)
        worker.use_buffers(self._buffers)
        return Reply("ready", (worker.layout, options.buffers, worker.num_envs))

    def _work(self, worker: RolloutWorker, command: str, argument: Any) -> Reply:
        answer = worker.execute(command, argument)
        if answer is None:
            return _NO_ANSWER
        kind, value = answer
        return Reply(kind, value, self._buffers[value] if kind == "batch" else None)

    def close(self) -> None:
        """Shut the schemes down and close the environments. Idempotent."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


class CalledWorker(WorkerHandle):
    """A worker that executes commands in calls."""

    @abstractmethod
    def call(self, command: str, argument: Any, on_reply: Callable[[Reply], None]) -> None:
        """Call the worker after all earlier calls.

        ``on_reply`` is called once, possibly before this returns, in any thread. The reply of a worker that
        has ended is ``died`` with the error of the call.
        """

    def exit_reason(self, error: str) -> str:
        """Return how the worker has ended, as text to follow "worker 3 ", after a call has raised ``error``."""
        return error


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
        """See WorkerPool."""
        worker.call(command, argument, lambda reply: self._put(worker, reply))

    def _put(self, worker: C, reply: Reply) -> None:
        self._replies.append((worker, reply))
        self._replied.set()

    def poll(self, workers: Collection[C], wakeup_fd: int, timeout: float | None) -> list[Event]:
        """See WorkerPool."""
        if self._replied.fileno() not in wait([self._replied.fileno(), wakeup_fd], pollable(timeout)):
            return []
        self._replied.clear()
        events: list[Event] = []
        while self._replies:
            worker, reply = self._replies.popleft()
            if worker not in workers:
                continue  # it was discarded
            value = reply.value
            if reply.kind == "ready":
                layout, count, num_envs = value
                worker.set_ready(layout, layout.allocate(count), num_envs)
            elif reply.payload is not None:
                np.copyto(worker.buffers[value].numpy(), np.asarray(reply.payload))
            elif reply.kind == "died":
                value = worker.exit_reason(value)
            if reply.kind:
                events.append(Event(worker, reply.kind, value))
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
