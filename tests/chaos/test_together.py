"""Two models at once (``wsync.synchronize``): whatever fails, no worker has one of them without the other."""

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from backends import BuiltIn
from cells import VICTIM, Cell

import wsync
from wsync.testing import Session
from wsync.testing.models import WithExtraState, fill


class EndsItsProcess(WithExtraState):
    """Sent the extra state ``"kill 1"``, worker 1 ends by SIGKILL as it takes it over."""

    def set_extra_state(self, state: Any) -> None:
        if state == f"kill {self.worker_idx}":
            os.kill(os.getpid(), signal.SIGKILL)
        super().set_extra_state(state)


@contextmanager
def two_models(backend: BuiltIn) -> Iterator[tuple[Session, Session]]:
    """Two models of the same two workers."""
    with (
        backend.connected(make=EndsItsProcess, model_id="actor") as actor,
        backend.join(actor.workers, EndsItsProcess, "critic") as critic,
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
                send_both(actor, critic, -1)
                break
            except wsync.WorkerDied:
                continue
        assert all_have(actor, critic, -1)


def test_killed_while_two_models_are_installed(cell: Cell, backend: BuiltIn) -> None:
    """Two models are sent together (`weights_dict`), and a worker is killed inside the `set_extra_state` of the second
    one. The error names it, and no other worker has one model without the other."""
    with two_models(backend) as (actor, critic):
        victim = critic.workers[VICTIM]
        victim.alive = False
        critic.model.state = f"kill {VICTIM}"
        with cell.detects(wsync.WorkerDied, "worker 1"):
            send_both(actor, critic, 2)
        assert all_have(actor, critic, 1) or all_have(actor, critic, 2)
        critic.model.state = "accepted"
        updates_continue(cell, actor, critic)


def test_killed_at_any_moment_of_two_models(cell: Cell, backend: BuiltIn) -> None:
    """Two models are sent together again and again, and a worker is killed at a random moment (seeded). The error
    names it, and the others have both models of one update."""
    with two_models(backend) as (actor, critic):
        moment = random.Random(actor.scheme.name).uniform(0.0, 0.02)
        timer = threading.Timer(moment, actor.workers[VICTIM].kill)
        timer.start()
        with cell.detects(wsync.WorkerDied, "worker 1"):
            for value in count(2):
                send_both(actor, critic, value)
        timer.join()
        assert actor.outputs() == critic.outputs()
        updates_continue(cell, actor, critic)
