"""The contract, part 8: workers that fetch (``initiator="receiver"``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import wsync
import wsync.testing.commands as commands
from wsync.testing.commands import WorkerState
from wsync.testing.hooks import TIMEOUT, BackendHooks
from wsync.testing.models import Small, fill
from wsync.testing.session import Session
from wsync.testing.updates import TwoReads

LAST = 60
"""The last version, where workers fetch while the trainer sends."""

# --- commands ---


def pull(state: WorkerState, timeout: float = TIMEOUT) -> int:
    """Install the newest version; return its number."""
    return state.schemes["policy"].pull(timeout)


def catch_up(state: WorkerState, version: int) -> list[float]:
    """Forward until the model has ``version`` or a newer one; return the output."""
    for _ in range(1_000_000):
        reached = state.schemes["policy"].version >= version  # before the forward: the receiver thread installs as well
        output = commands.output(state)
        if reached:
            return output
    raise AssertionError(f"the forwards have never used version {version}")


def act_and_pull(state: WorkerState, last: int) -> int:
    """Forward and pull in turn until the model has version ``last``; return how many forwards were torn."""
    torn, scheme, model = 0, state.schemes["policy"], state.models["policy"]
    while True:
        final = scheme.version >= last
        for _ in range(5):
            low, high = model().tolist()
            torn += low != high
        if final:
            return torn
        scheme.pull(TIMEOUT)


class Pull(BackendHooks):
    """Workers install a version when they ask for it."""

    @contextmanager
    def fetching(self, make: type[Small] = Small, **options: Any) -> Iterator[Session]:
        """Two workers that have the first weights, ones."""
        try:
            scheme = self.make_scheme(timeout=TIMEOUT, initiator="receiver", **options)
        except TypeError as error:
            pytest.skip(f"workers do not fetch: let __init__ pass **options on to super().__init__ ({error})")
        with self.workers(2) as workers, scheme:
            model = fill(make(), 1)
            scheme.init_on_sender("policy", model=model, num_workers=2)
            session = Session(scheme, workers, model, make, "policy")
            for index, worker in enumerate(workers):
                session.begin_join(worker, index)
            scheme.connect()
            if not self.first_weights_at_connect:
                scheme.send()
            workers.results()
            assert workers.call(pull) == [1, 1]
            yield session

    def test_a_worker_installs_the_newest_version_when_it_pulls(self) -> None:
        """``send`` waits for no worker; a version that was not pulled is skipped; each worker pulls for itself."""
        with self.fetching() as session:
            for value in (2, 3, 4):
                report = session.send(value)
                assert report is not None and report.version == value
                assert session.outputs() == [1, 1]
            assert session.workers[0].call(pull) == 4
            assert session.outputs() == [4, 1]
            session.send(5)
            assert session.workers.call(pull) == [5, 5]
            assert session.outputs() == [5, 5]
            assert session.workers.call(pull) == [5, 5]  # there is no newer one

    def test_a_worker_that_is_too_far_behind_fetches_before_its_next_forward(self) -> None:
        with self.fetching(max_staleness=2) as session:
            for value in (2, 3):
                session.send(value)
            assert session.outputs() == [1, 1]
            session.send(4)
            assert session.workers.call(catch_up, 4) == [[4.0] * 4] * 2
            session.send(5)
            assert session.outputs() == [4, 4]
            assert session.workers.call(pull) == [5, 5]

    @pytest.mark.parametrize("max_staleness", [None, 0, 3])
    def test_no_forward_is_torn_while_workers_fetch_and_the_trainer_sends(self, max_staleness: int | None) -> None:
        with self.fetching(TwoReads, max_staleness=max_staleness) as session:
            for worker in session.workers:
                worker.start(act_and_pull, LAST)
            for value in range(2, LAST + 1):
                session.send(value)
            assert session.workers.results() == [0, 0]

    def test_a_replacement_pulls_too(self) -> None:
        with self.fetching() as session:
            session.send(2)
            session.workers[1].kill()
            assert session.restart(1) == 2
            session.send(3)
            assert session.outputs() == [1, 2]
            assert session.workers.call(pull) == [3, 3]
            assert session.outputs() == [3, 3]

    def test_a_send_after_the_death_of_a_worker_names_it(self) -> None:
        """A send here waits for no answer, so nothing but the death itself can tell."""
        with self.fetching() as session:
            for value in (2, 3):
                session.send(value)
            session.workers[1].kill()
            assert session.workers[0].call(pull) == 3  # the sender reads all messages, so it has noticed the death
            with pytest.raises(wsync.WorkerDied, match="worker 1"):
                session.send(4)
            assert session.workers[0].call(pull) == 4

    def test_models_of_workers_that_fetch_cannot_be_switched_together(self) -> None:
        with self.fetching() as session, pytest.raises(wsync.WeightSyncError, match="one by one"):
            wsync.synchronize({session.scheme: fill(session.model, 2)})
