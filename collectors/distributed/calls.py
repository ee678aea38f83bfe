"""Workers that are called: each command is a call, and what it returns the answer."""

from __future__ import annotations

import os
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, TypeVar

import numpy as np
import torch

from collectors.workers.pool import GRACE, Event, Pool, Worker


@dataclass(frozen=True)
class Answer:
    """What a call returned.

    Attributes:
        kind: ``ready``, ``connected``, ``batch``, ``ended``, ``error`` or ``died``; none after ``seed``, ``resume``.
        value: what goes with it.
        payload: a batch's bytes, uint8: whichever of the two the calls carry without a copy.
    """

    kind: str = ""
    value: Any = None
    payload: torch.Tensor | np.ndarray | None = None


class WakeEvent:
    """A descriptor that another thread makes readable; setting it after ``close`` is harmless."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor: int | None = os.eventfd(0, os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """The descriptor."""
        if self._descriptor is None:
            raise ValueError("this signal is closed")
        return self._descriptor

    def set(self) -> None:
        """Make it readable."""
        with self._lock:
            if self._descriptor is not None:
                os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Wait until it is readable, and make it not so."""
        os.eventfd_read(self.fileno())

    def close(self) -> None:
        """Close the descriptor; harmless when repeated."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


class CalledWorker(Worker):
    """A worker whose commands are calls."""

    @abstractmethod
    def call(self, command: str, argument: Any, answered: Callable[[Answer], None]) -> None:
        """Have the worker obey, after what it was told before; ``answered`` is called later, in some thread.

        A worker that has ended answers ``died``, and the error that the call has raised.
        """

    def last_words(self, error: str) -> str:
        """What there is to say of its end, when a call has raised ``error``, in an error that begins with its name."""
        return error


C = TypeVar("C", bound=CalledWorker)


class CallPool(Pool[C]):
    """Calls workers, and waits for what any of them returns: a call to one that has ended returns too."""

    def __init__(self) -> None:
        super().__init__()
        self._answers: deque[tuple[C, Answer]] = deque()
        self._some = WakeEvent()

    def tell(self, workers: Collection[C], command: str, argument: Any = None) -> None:
        """See Pool."""
        for worker in workers:
            worker.call(command, argument, lambda answer, worker=worker: self._put(worker, answer))

    def _put(self, worker: C, answer: Answer) -> None:
        self._answers.append((worker, answer))
        self._some.set()

    def listen(self, workers: Collection[C], wake: int, timeout: float | None) -> list[Event[C]]:
        """See Pool."""
        if self._some.fileno() not in wait([self._some.fileno(), wake], timeout):
            return []
        self._some.clear()
        heard: list[Event[C]] = []
        while self._answers:
            worker, answer = self._answers.popleft()
            if worker not in workers:
                continue  # it was let go
            if answer.kind == "ready":
                plan, count, num_envs = answer.value
                worker.ready(plan, plan.allocate(count), num_envs)
            elif answer.payload is not None:
                np.copyto(worker.buffers[answer.value].numpy(), np.asarray(answer.payload))
            if answer.kind:
                died = answer.kind == "died"
                heard.append((worker, answer.kind, worker.last_words(answer.value) if died else answer.value))
        return heard

    def _end_work(self) -> None:
        """Tell all workers to end their work, and wait until they have, or died, or do not in time."""
        ended: list[Answer] = []
        some = WakeEvent()

        def on_end(answer: Answer) -> None:
            ended.append(answer)
            some.set()

        for worker in self.workers:
            worker.call("end", None, on_end)
        deadline = time.monotonic() + GRACE
        while len(ended) < len(self.workers) and wait([some.fileno()], max(0.0, deadline - time.monotonic())):
            some.clear()
        some.close()
