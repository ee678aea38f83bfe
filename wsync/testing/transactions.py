"""The contract, part 5: several models at once. Every worker gets all of them, or none gets any."""

from __future__ import annotations

import pytest

import wsync
from wsync.testing.hooks import SHORT, TIMEOUT, BackendHooks
from wsync.testing.models import Small, WithExtraState, fill, longer
from wsync.testing.session import Session

_REFUSED = 12


def _send_both(actor: Session, critic: Session, value: float) -> None:
    wsync.synchronize({actor.scheme: fill(actor.model, value), critic.scheme: fill(critic.model, -value)})


class Transactions(BackendHooks):
    """``wsync.synchronize`` of two schemes."""

    def test_both_models_arrive_together(self) -> None:
        with self.connected(model_id="actor") as actor, self.second_model(actor, Small, "critic") as critic:
            for value in range(2, 12):
                _send_both(actor, critic, value)
                assert actor.outputs() == [value, value] and critic.outputs() == [-value, -value]
            wsync.synchronize(
                {actor.scheme: fill(actor.model, 50), critic.scheme: fill(critic.model, 51)}, worker_ids=0
            )
            assert actor.outputs() == [50, 11] and critic.outputs() == [51, -11]
            actor.send(60)
            critic.send(61)
            assert actor.outputs() == [60, 60] and critic.outputs() == [61, 61]

    def test_a_model_that_one_worker_refuses_is_installed_nowhere_nor_is_the_other(self) -> None:
        with (
            self.connected(make=WithExtraState, model_id="actor") as actor,
            self.second_model(actor, WithExtraState, "critic") as critic,
        ):
            before = actor.digests(), critic.digests()
            critic.model.state = "refuse 1"
            with pytest.raises(wsync.WorkerFailed, match=r"(?s)worker 1.*ArithmeticError"):
                _send_both(actor, critic, 2)
            assert (actor.digests(), critic.digests()) == before
            critic.model.state = "accepted"
            _send_both(actor, critic, 3)
            assert actor.outputs() == [3, 3] and critic.outputs() == [-3, -3]

    def test_a_model_that_does_not_fit_is_sent_nowhere_nor_is_the_other(self) -> None:
        with self.connected(model_id="actor") as actor, self.second_model(actor, Small, "critic") as critic:
            with pytest.raises(wsync.LayoutMismatch):
                wsync.synchronize({actor.scheme: fill(actor.model, 2), critic.scheme: longer()})
            assert actor.outputs() == [1, 1] and critic.outputs() == [1, 1]
            _send_both(actor, critic, 3)
            assert actor.outputs() == [3, 3] and critic.outputs() == [-3, -3]

    def test_a_death_aborts_the_update_and_the_survivors_get_the_next(self) -> None:
        """It fails one transaction only, although only one model's prepare has noticed it."""
        with self.connected(model_id="actor") as actor, self.second_model(actor, Small, "critic") as critic:
            actor.workers[1].kill()
            with pytest.raises(wsync.WorkerDied, match=r"'actor': (?s:.)*worker 1"):
                _send_both(actor, critic, 2)
            assert actor.outputs() == [1] and critic.outputs() == [1]
            for value in (3, 4):
                _send_both(actor, critic, value)
                assert actor.outputs() == [value] and critic.outputs() == [-value]

    def test_a_stopped_worker_aborts_the_update(self) -> None:
        with self.connected(model_id="actor") as actor, self.second_model(actor, Small, "critic") as critic:
            actor.scheme.timeout = critic.scheme.timeout = SHORT
            actor.workers[1].stop()
            with pytest.raises(wsync.SyncTimeout, match="worker 1"):
                _send_both(actor, critic, 2)
            actor.workers[1].resume()
            assert actor.outputs() == [1, 1] and critic.outputs() == [1, 1]
            actor.scheme.timeout = critic.scheme.timeout = TIMEOUT
            _send_both(actor, critic, 3)
            assert actor.outputs() == [3, 3] and critic.outputs() == [-3, -3]

    def test_two_models_of_one_name_are_refused(self) -> None:
        with self.connected(1) as first, self.make_scheme(timeout=TIMEOUT) as second:
            second.init_on_sender("policy", model=Small(), num_workers=1)
            with pytest.raises(ValueError, match="model_id"):
                wsync.synchronize({first.scheme: fill(Small(), 2), second: fill(Small(), 3)})
            assert first.outputs() == [1]
