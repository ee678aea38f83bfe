"""Who is late, and who is only not yet listened to."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

import wsync
from collectors.workers.members import Members
from collectors.workers.pool import Event, Pool, Worker
from collectors.workers.recovery import FailurePolicy, Failures
from collectors.workers.worker import WorkerOptions


class Here(Worker):
    """A worker that needs no process."""

    @property
    def sentinel(self) -> int:
        return -1


class Told(Pool[Here]):
    """Two workers; each listening hears the next of what they are given to say."""

    def __init__(self, *said: list[tuple[int, str]]) -> None:
        super().__init__()
        self.workers = [Here(0), Here(1)]
        self.said = list(said)

    def tell(self, workers: Collection[Here], command: str, argument: Any = None) -> None:
        pass

    def listen(self, workers: Collection[Here], wake: int, timeout: float | None) -> list[Event[Here]]:
        return [(self.workers[i], kind, None) for i, kind in (self.said.pop(0) if self.said else [])]

    def let_go(self, worker: Here) -> None:
        self.workers.remove(worker)

    def close(self) -> None:
        self.workers = []


def start(*said: list[tuple[int, str]]) -> None:
    """With no time to answer: whoever has not been heard is late."""
    members = Members(Told(*said), FailurePolicy(worker_timeout=1e-9), {}, Failures())
    options = [WorkerOptions(worker_idx=i, frames=1, buffers=1) for i in range(2)]
    try:
        members.start([b"", b""], options)
    finally:
        members.close()


def test_who_has_spoken_while_the_trainer_attended_to_another_is_not_late() -> None:
    start([(0, "ready")], [(1, "ready")], [(1, "connected")], [(0, "connected")])


def test_who_has_not_is_named() -> None:
    with pytest.raises(wsync.SyncTimeout, match="worker 1 did not answer"):
        start([(0, "ready")])
