"""A worker is killed, at every moment of an update, or stopped: the error names it, and the others have the update."""

import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch
from backends import BuiltIn
from cells import DEADLINE, VICTIM, Cell

import wsync
from wsync.testing import Session, commands
from wsync.testing.commands import WorkerState
from wsync.testing.hooks import TIMEOUT
from wsync.testing.models import Small, make_large


class Blocking(Small):
    """Its forward, once it has a ``fifo``, opens that and does not end."""

    fifo = ""

    def forward(self, *, twice: bool = False) -> torch.Tensor:
        if self.fifo:
            with open(self.fifo, "w"):
                pass
            threading.Event().wait()
        return super().forward(twice=twice)


def block(state: WorkerState, fifo: str) -> None:
    model = state.models["policy"]
    assert isinstance(model, Blocking)
    model.fifo = fifo
    model()


def updates_continue(cell: Cell, session: Session, value: float = 3) -> None:
    """The survivors have the update before ``value``, and get the next ones."""
    assert set(session.outputs()) == {value - 1}
    with cell.recovers():
        session.send(value)
        assert set(session.outputs()) == {value}
    for later in (value + 1, value + 2, value + 3):  # more than there are slots
        session.update(later)
        assert set(session.outputs()) == {later}


def test_killed_between_updates(cell: Cell, backend: BuiltIn) -> None:
    """A worker is killed (SIGKILL) while nothing is being sent. The next send names it, and the others have the
    update."""
    with backend.connected() as session:
        session.workers[VICTIM].kill()
        with cell.detects(wsync.WorkerDied, "worker 1") as died:
            session.send(2)
        assert set(died.value.workers) == {VICTIM}
        updates_continue(cell, session)


def test_killed_during_an_update(cell: Cell, backend: BuiltIn) -> None:
    """A worker is killed at a random moment (seeded) while 32 MiB are packed and transferred. The send names it and
    ends, and the others have the update."""
    with backend.connected(make=make_large) as session:
        session.workers[VICTIM].stop()  # so that it has not answered by then
        killed: list[float] = []

        def kill() -> None:
            killed.append(time.perf_counter())
            session.workers[VICTIM].kill()

        timer = threading.Timer(random.Random(session.scheme.name).uniform(0.0, 0.05), kill)
        timer.start()
        with pytest.raises(wsync.WorkerDied, match="worker 1") as died:
            session.update(2)
        cell.detection = time.perf_counter() - killed[0]
        timer.join()
        assert set(died.value.workers) == {VICTIM}
        updates_continue(cell, session)


def test_killed_before_its_acknowledgement(cell: Cell, backend: BuiltIn) -> None:
    """A worker is killed after an update was written, and before it has acknowledged it. The wait for the
    acknowledgement ends at once and names the worker, and the others have the update."""
    with backend.connected() as session:
        session.workers[VICTIM].stop()
        session.post(2)
        session.workers[VICTIM].kill()
        with cell.detects(wsync.WorkerDied, "worker 1"):
            session.scheme.wait_async()
        updates_continue(cell, session)


def test_killed_inside_a_forward(cell: Cell, backend: BuiltIn, tmp_path: Path) -> None:
    """A worker is killed while its forward runs: in `shared_mem`, on weights in memory that it shares with the trainer,
    which is used again. The wait for its acknowledgement names it."""
    os.mkfifo(fifo := tmp_path / "inside")
    with backend.connected(make=Blocking) as session:
        session.workers[VICTIM].start(block, str(fifo))
        fifo.read_bytes()  # returns when the worker is inside
        session.post(2)
        session.workers[VICTIM].kill()
        with cell.detects(wsync.WorkerDied, "worker 1"):
            session.scheme.wait_async()
        updates_continue(cell, session)


def test_restarted_and_readmitted(cell: Cell, backend: BuiltIn) -> None:
    """A worker dies, two updates are sent, and a new one joins in its place (`scheme.readmit`). It has the newest
    version before its first forward; it misses those between, and no send waits for it."""
    with backend.connected() as session:
        session.workers[VICTIM].kill()
        with cell.detects(wsync.WorkerDied, "worker 1"):
            session.send(2)
        session.send(3)
        with cell.recovers():
            assert session.restart(VICTIM) == 3
            assert session.outputs() == [3, 3]
        session.send(4)
        assert session.outputs() == [4, 4]


def test_all_killed(cell: Cell, backend: BuiltIn) -> None:
    """Every worker is killed. The send names them all; the next one says that no worker is left."""
    with backend.connected() as session:
        for worker in session.workers:
            worker.kill()
        with cell.detects(wsync.WorkerDied, r"(?s)worker.* 0.*1"):
            session.update(2)
        with pytest.raises(wsync.NotConnected, match=r"every worker has died.*start another"):
            session.send(3)


def test_stopped_and_continued(cell: Cell, backend: BuiltIn) -> None:
    """A worker is stopped (SIGSTOP). `wait_async` ends at its deadline, and names it and the cause; the others have
    the update. When it continues (SIGCONT) it installs the newest version, and skips those before."""
    with backend.connected() as session:
        session.scheme.timeout = DEADLINE
        session.workers[VICTIM].stop()
        with cell.detects(wsync.SyncTimeout, "worker 1: did not answer before the deadline") as late:
            session.update(2)
        assert set(late.value.workers) == {VICTIM}
        assert session.workers[0].call(commands.output)[0] == 2
        for value in (3, 4, 5):
            session.post(value)
        session.scheme.timeout = TIMEOUT
        session.post(6)
        assert session.workers[0].call(commands.receive, 10.0) is not None
        with cell.recovers():
            session.workers[VICTIM].resume()
            session.scheme.wait_async()
            assert session.outputs() == [6, 6]
        session.send(7)
        assert session.outputs() == [7, 7]
