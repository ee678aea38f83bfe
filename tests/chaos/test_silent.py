"""A worker acknowledges nothing, or too late, or twice: every send ends by its deadline, and the next one works."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from backends import BuiltIn
from cells import DEADLINE, VICTIM, Cell
from relay import HOLD, Relay, acknowledgements_of, intercept

import wsync
from wsync.testing import Session, commands
from wsync.testing.hooks import TIMEOUT
from wsync.testing.models import Small, fill
from wsync.testing.session import connect_all


@contextmanager
def relayed(backend: BuiltIn) -> Iterator[tuple[Session, Relay]]:
    """Two workers, connected through a relay."""
    with backend.workers(2) as workers, backend.make_scheme(timeout=TIMEOUT) as scheme:
        session = Session(scheme, workers, fill(Small(), 1), Small, "policy")
        with intercept(scheme) as relays:
            scheme.init_on_sender("policy", model=session.model, num_workers=2)
        connect_all(session, first_weights_at_connect=backend.first_weights_at_connect)
        yield session, relays[0]


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


def test_acknowledgement_delayed(cell: Cell, backend: BuiltIn) -> None:
    """A worker's acknowledgements are held back beyond the deadline. Each `wait_async` ends at its deadline;
    the acknowledgement of an older version, when it arrives at last, does not count for a newer one."""
    with relayed(backend) as (session, relay):
        session.scheme.timeout = DEADLINE
        relay.rule = acknowledgements_of(VICTIM, HOLD)
        update_without_acknowledgement(cell, session, 2)
        session.workers[VICTIM].stop()  # so that it does not acknowledge the next one, too
        session.post(3)
        assert relay.release() == 1
        with pytest.raises(wsync.SyncTimeout, match="worker 1"):
            session.scheme.wait_async()
        assert session.workers[0].call(commands.output)[0] == 3
        session.workers[VICTIM].resume()
        relay.rule = acknowledgements_of(VICTIM, 1)
        session.scheme.timeout = TIMEOUT
        with cell.recovers():
            relay.release()
            session.update(4)
            assert session.outputs() == [4, 4]


def test_acknowledgement_dropped(cell: Cell, backend: BuiltIn) -> None:
    """A worker's acknowledgement of an update is lost. `wait_async` ends at its deadline, and the
    next update works."""
    with relayed(backend) as (session, relay):
        session.scheme.timeout = DEADLINE
        relay.rule = acknowledgements_of(VICTIM, 0)
        update_without_acknowledgement(cell, session, 2)
        relay.rule = acknowledgements_of(VICTIM, 1)
        session.scheme.timeout = TIMEOUT
        with cell.recovers():
            session.update(3)
            assert session.outputs() == [3, 3]


def test_acknowledgement_duplicated(cell: Cell, backend: BuiltIn) -> None:
    """Each acknowledgement of a worker arrives twice. The second one of a version does not count for the next one: the
    worker is stopped then, and the next update is a timeout at the deadline.
    """
    with relayed(backend) as (session, relay):
        relay.rule = acknowledgements_of(VICTIM, 2)
        with cell.recovers():
            for value in range(2, 6):
                session.update(value)
                assert session.outputs() == [value, value]
        session.scheme.timeout = DEADLINE
        session.workers[VICTIM].stop()
        started = time.perf_counter()
        with pytest.raises(wsync.SyncTimeout, match="worker 1"):
            session.update(6)
        cell.detection = time.perf_counter() - started
        session.workers[VICTIM].resume()
        session.scheme.timeout = TIMEOUT
        session.update(7)
        assert session.outputs() == [7, 7]
