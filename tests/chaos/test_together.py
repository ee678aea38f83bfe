"""Two models at once (``wsync.synchronize``): whatever fails, no worker has one of them without the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from backends import BuiltIn
from cells import VICTIM, Cell

import wsync
from wsync.sending.transactions import Transaction
from wsync.testing import Session
from wsync.testing.models import WithExtraState, fill


@contextmanager
def two_models(backend: BuiltIn) -> Iterator[tuple[Session, Session]]:
    """Two models of the same two workers."""
    with (
        backend.connected(make=WithExtraState, model_id="actor") as actor,
        backend.second_model(actor, WithExtraState, "critic") as critic,
    ):
        yield actor, critic


def send_both(actor: Session, critic: Session, value: float) -> None:
    wsync.synchronize({actor.scheme: fill(actor.model, value), critic.scheme: fill(critic.model, value)})


def all_have(actor: Session, critic: Session, value: float) -> bool:
    return set(actor.outputs()) == set(critic.outputs()) == {value}


def updates_continue(cell: Cell, actor: Session, critic: Session) -> None:
    """Each scheme notices the death, and raises once; then the survivors get both models."""
    with cell.recovers():
        for _ in range(3):
            try:
                send_both(actor, critic, 5)
                break
            except wsync.WorkerDied:
                continue
        assert all_have(actor, critic, 5)


@contextmanager
def around(phase: str, nth: int, kill: Callable[[], None], before: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Call ``before`` and ``kill`` around a phase of a transaction, that of its first or its second model."""
    real, seen = getattr(Transaction, phase), 0

    def interrupted(*args: Any) -> None:
        nonlocal seen
        seen += 1
        if seen != nth:
            real(*args)
            return
        before()
        real(*args)
        kill()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transaction, phase, interrupted)
        yield
        assert seen >= nth


def test_killed_before_the_second_model_is_prepared(cell: Cell, backend: BuiltIn) -> None:
    """Two models are sent together (`weights_dict`), and a worker is killed before it has prepared the second one.
    No worker installs either."""
    with two_models(backend) as (actor, critic):
        with around("prepare", 1, actor.workers[VICTIM].kill), cell.detects(wsync.WorkerDied, "worker 1"):
            send_both(actor, critic, 2)
        assert all_have(actor, critic, 1)
        updates_continue(cell, actor, critic)


def test_killed_before_the_commit_of_two_models(cell: Cell, backend: BuiltIn) -> None:
    """A worker is killed when every worker has prepared both models: the others install both, and the error says that
    the update was committed."""
    with two_models(backend) as (actor, critic):
        error = r"(?s)it was committed.*worker 1"
        with around("prepare", 2, actor.workers[VICTIM].kill), cell.detects(wsync.WorkerDied, error):
            send_both(actor, critic, 2)
        assert all_have(actor, critic, 2)
        updates_continue(cell, actor, critic)


def test_killed_between_the_commits_of_two_models(cell: Cell, backend: BuiltIn) -> None:
    """A worker is killed when the first of two models was committed. The others have both, and the error says so."""
    with two_models(backend) as (actor, critic):
        victim, error = actor.workers[VICTIM], r"(?s)it was committed.*worker 1"
        # Stopped before, so that it has not acknowledged.
        with around("commit", 1, victim.kill, before=victim.stop), cell.detects(wsync.WorkerDied, error):
            send_both(actor, critic, 2)
        assert all_have(actor, critic, 2)
        updates_continue(cell, actor, critic)


def test_one_of_two_models_is_refused(cell: Cell, backend: BuiltIn) -> None:
    """One of two models is refused by one worker. No worker has either; the next ones work."""
    with two_models(backend) as (actor, critic):
        critic.model.state = "refuse 1"
        with cell.detects(wsync.WorkerFailed, r"(?s)worker 1.*ArithmeticError"):
            send_both(actor, critic, 2)
        assert all_have(actor, critic, 1)
        critic.model.state = "accepted"
        with cell.recovers():
            send_both(actor, critic, 3)
            assert all_have(actor, critic, 3)
