"""A worker acknowledges nothing, or too late, or twice: every send ends by its deadline, and the next one works."""

from __future__ import annotations

from backends import BuiltIn
from cells import DEADLINE, VICTIM, Cell

import wsync
from wsync.testing import Session, commands
from wsync.testing.hooks import TIMEOUT


def update_without_acknowledgement(cell: Cell, session: Session, value: float) -> None:
    """An update that the victim does not acknowledge."""
    with cell.detects(wsync.SyncTimeout, "worker 1: did not answer before the deadline") as late:
        session.update(value)
    assert set(late.value.workers) == {VICTIM}


def test_stopped_and_continued(cell: Cell, backend: BuiltIn) -> None:
    """A worker is stopped (SIGSTOP). `wait_async` ends at its deadline, and names it and the cause; the others have
    the update. When it continues (SIGCONT) it installs the newest version, and skips those before."""
    with backend.connected() as session:
        session.scheme.timeout = DEADLINE
        session.workers[VICTIM].stop()
        update_without_acknowledgement(cell, session, 2)
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
