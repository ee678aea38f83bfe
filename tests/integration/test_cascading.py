"""The context of a worker has workers of its own: each installed update is passed on to it."""

import multiprocessing
import pickle
from contextlib import suppress

import pytest
from torch import nn

import wsync
from wsync.testing.models import fill

CONTEXT = multiprocessing.get_context("forkserver")


def linear(value: float) -> nn.Linear:
    return fill(nn.Linear(1, 1, bias=False), value)


class Relay:
    """Has a model and workers of its own, here a pipe."""

    def __init__(self, line, fails_at: float | None = None) -> None:
        self.policy, self.line, self.fails_at = linear(0.0), line, fails_at

    def _pass_on(self, *passed: object) -> None:
        if self.policy.weight.item() == self.fails_at:
            raise ArithmeticError("the workers below are on strike")
        self.line.send(passed)


class Newest(Relay):
    def update_policy_weights_(self, policy_or_weights=None, /, *, weights=None, model_id=None):
        self._pass_on(weights["weight"].item(), model_id)


class Cascade(Relay):
    def cascade_weights(self, model_id):
        self._pass_on(self.policy.weight.item(), model_id)


def relay(kind, scheme, line, fails_at):
    scheme.init_on_receiver("policy", context=kind(line, fails_at), worker_idx=0)
    scheme.connect()
    with suppress(wsync.NotConnected):
        while scheme.receive() is not None:
            pass
    scheme.shutdown()


def started(kind, scheme, fails_at=None):
    mine, theirs = CONTEXT.Pipe()
    scheme.init_on_sender("policy", model=linear(1.0), num_workers=1)
    process = CONTEXT.Process(target=relay, args=(kind, scheme, theirs, fails_at))
    process.start()
    theirs.close()
    return process, mine


CASES = [
    (Newest, "shared_mem", {}),
    (Newest, "multiprocess", {"strategy": "state_dict"}),
    (Newest, "distributed", {}),
    (Cascade, "multiprocess", {}),
    (Cascade, "distributed", {"shared_memory": False}),
]


@pytest.mark.parametrize(("kind", "name", "options"), CASES)
def test_each_installed_update_is_passed_on_before_it_is_acknowledged(kind, name, options):
    with wsync.WeightSyncScheme.from_backend(name, **options) as scheme:
        process, mine = started(kind, scheme)
        scheme.connect()
        for value in (1.0, 2.0, 3.0):
            if value > 1.0:
                scheme.send(linear(value))
            assert mine.poll(), "acknowledged, and not passed on"
            assert mine.recv() == (value, "policy")
    process.join(20)
    assert process.exitcode == 0


@pytest.mark.parametrize(("kind", "name", "options"), [CASES[0], *CASES[3:]])
def test_an_update_that_cannot_be_passed_on_is_an_error_of_the_send(kind, name, options):
    method = "cascade_weights" if kind is Cascade else "update_policy_weights_"
    with wsync.WeightSyncScheme.from_backend(name, **options) as scheme:
        process, mine = started(kind, scheme, fails_at=2.0)
        scheme.connect()
        with pytest.raises(wsync.WorkerFailed, match=f"(?s){method}.*the workers below are on strike"):
            scheme.send(linear(2.0))
        scheme.send(linear(3.0))
        assert [mine.recv()[0], mine.recv()[0]] == [1.0, 3.0]
    process.join(20)


@pytest.mark.parametrize("kind", [Newest, Cascade])
def test_a_published_send_cannot_promise_anything_for_workers_below(kind):
    with wsync.SharedMemWeightSyncScheme(acknowledge="published") as scheme:
        scheme.init_on_sender("policy", model=linear(1.0), num_workers=1)
        own = pickle.loads(pickle.dumps(scheme))
        with pytest.raises(ValueError, match="acknowledge='installed'"):
            own.init_on_receiver("policy", context=kind(None), worker_idx=0)
