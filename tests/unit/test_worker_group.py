"""A group of workers without processes: which of them are late, and an update that the end overtakes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import wsync
from collectors.worker import WorkerOptions
from collectors.workers.gathering import SyncGathering
from collectors.workers.group import WorkerGroup
from collectors.workers.pool import Event, WorkerHandle, WorkerPool
from collectors.workers.records import FailurePolicy, Failures


class FakeWorker(WorkerHandle):
    """A worker without a process; it does not end."""

    def __init__(self, worker_idx: int) -> None:
        super().__init__(worker_idx)
        self.never = os.eventfd(0)
        self.batches = [TensorDict({"worker": torch.full((1,), worker_idx)}, [1])]

    @property
    def sentinel(self) -> int:
        return self.never


class ScriptedPool(WorkerPool[FakeWorker]):
    """Two workers; each poll returns the next of the given lists of events."""

    def __init__(self, *script: list[tuple[int, str]]) -> None:
        super().__init__()
        self.workers = [FakeWorker(0), FakeWorker(1)]
        self.script = list(script)

    def send(self, worker: FakeWorker, command: str, argument: Any = None) -> None:
        pass

    def poll(self, workers: Collection[FakeWorker], wakeup_fd: int, timeout: float | None) -> list[Event]:
        assert self.script or timeout is not None, "nothing would end this wait"
        return [Event(self.workers[i], kind, 0) for i, kind in (self.script.pop(0) if self.script else [])]

    def discard(self, worker: FakeWorker) -> None:
        self.workers.remove(worker)
        os.close(worker.never)

    def close(self) -> None:
        for worker in list(self.workers):
            self.discard(worker)


def start(*script: list[tuple[int, str]], update: Callable[[WorkerGroup], object] = lambda _: None) -> None:
    """Start with a timeout of nothing: every worker without an answer is late."""
    group = WorkerGroup(ScriptedPool(*script), FailurePolicy("drop", worker_timeout=1e-9), {}, Failures())
    options = [WorkerOptions(worker_idx=i, frames=1, buffers=1) for i in range(2)]
    try:
        group.build([b"", b""], options)
        group.connect()
        update(group)
    finally:
        group.close()


def test_a_worker_that_answers_while_another_is_handled_is_not_late() -> None:
    start([(0, "ready")], [(1, "ready")], [(1, "connected")], [(0, "connected")])


def test_a_worker_without_an_answer_is_named() -> None:
    with pytest.raises(wsync.SyncTimeout, match="worker 1 did not answer"):
        start([(0, "ready")])


def test_a_batch_of_a_worker_that_an_update_has_dropped_meanwhile_is_not_waited_for() -> None:
    def update(group: WorkerGroup) -> None:
        def send(_weights: object, _workers: object) -> None:
            raise wsync.SyncTimeout("worker 1 is late", {1: "late"}, version=2)

        awaited = [worker for worker in group.active_workers if worker.worker_idx == 1]
        group.deliver(send, None, None)
        assert group.next_batch(awaited) is None

    start([(0, "ready"), (1, "ready")], [(0, "connected"), (1, "connected")], update=update)


def test_a_batch_of_a_worker_that_ended_after_it_is_delivered() -> None:
    def gather(group: WorkerGroup) -> None:
        batch = SyncGathering(0).gather(group, lambda *_: True)
        assert batch["worker"].tolist() == [0, 1]

    events = [(0, "batch"), (1, "batch"), (1, "died")]
    start([(0, "ready"), (1, "ready")], [(0, "connected"), (1, "connected")], events, update=gather)


def test_an_update_that_the_shutdown_overtakes_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectors.workers.group._CLOSE_GRACE", 0.0)

    def update(group: WorkerGroup) -> None:
        def send(_weights: object, _workers: object) -> None:
            closing = threading.Thread(target=group.close)
            closing.start()
            closing.join()
            raise wsync.WorkerDied("they were killed", {0: "killed", 1: "killed"})

        with pytest.raises(wsync.NotConnected, match="has been shut down"):
            group.deliver(send, None, None)

    start([(0, "ready"), (1, "ready")], [(0, "connected"), (1, "connected")], update=update)
