"""Workers with a line each, in processes that the trainer has started or that have joined it."""

from __future__ import annotations

import select
from abc import abstractmethod
from collections.abc import Collection
from multiprocessing.connection import wait
from typing import Any, TypeVar

from collectors.workers.lines import Line
from collectors.workers.pool import GRACE, Event, Pool, Worker

_LONG = 1e6  # seconds; more than fit into what the system takes are waited for in parts


class LineWorker(Worker):
    """A worker at the other end of a line.

    Args:
        worker_idx: its index.
        line: owned by this end.
    """

    def __init__(self, worker_idx: int, line: Line) -> None:
        super().__init__(worker_idx)
        self.line = line

    @abstractmethod
    def last_words(self) -> str:
        """What there is to say of its end, in an error that begins with its name."""


L = TypeVar("L", bound=LineWorker)


class LinePool(Pool[L]):
    """Talks to workers by their lines, and waits for the words and for the ends of all of them at once."""

    def tell(self, workers: Collection[L], command: str, argument: Any = None) -> None:
        """See Pool."""
        for worker in workers:
            try:
                if command == "build":
                    worker.line.limit(self.patience)
                worker.line.connection.send((command, argument))
            except OSError:
                continue

    def listen(self, workers: Collection[L], wake: int, timeout: float | None) -> list[Event[L]]:
        """See Pool."""
        poller = select.poll()  # a sixth of the time of multiprocessing's ``wait``
        poller.register(wake, select.POLLIN)
        for worker in workers:
            poller.register(worker.line.connection, select.POLLIN)
            poller.register(worker.sentinel, select.POLLIN)
        ready = {descriptor for descriptor, _ in poller.poll(None if timeout is None else min(timeout, _LONG) * 1e3)}
        events: list[Event[L]] = []
        for worker in workers:
            speaks = worker.line.connection.fileno() in ready
            if speaks or worker.sentinel in ready:
                events.append((worker, *self._word(worker, speaks)))
        return events

    def _word(self, worker: L, speaks: bool) -> tuple[str, Any]:
        """What ``worker`` says; if it has ended, what it said before that comes first."""
        line = worker.line
        try:
            if not (speaks or line.connection.poll(GRACE)):
                return "died", worker.last_words()
            kind, answer = line.connection.recv()
            if kind == "ready":
                plan, count, num_envs = answer
                worker.ready(plan, line.accept(plan, count), num_envs)
            elif kind == "batch":
                line.pull(worker.buffers[answer])
            elif kind == "error":
                wait([worker.sentinel], GRACE)  # it is told first, and then closes its environments and ends
        except BlockingIOError:
            return "stalled", "did not finish what it had begun to say"
        except (EOFError, OSError):
            return "died", worker.last_words()
        return kind, answer
