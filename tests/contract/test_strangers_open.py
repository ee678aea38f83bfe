"""What strangers hit in ``wsync`` and is open: points of issues 57 and 59, by their inputs, expected to fail."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import Any

import pytest
import torch
from backends import BuiltIn
from tensordict import TensorDict
from torch import nn

import wsync
from wsync.testing import WorkerError
from wsync.testing.commands import WorkerState


def issue(number: str) -> pytest.MarkDecorator:
    """An expected failure, until the rebuilt core takes it."""
    return pytest.mark.xfail(strict=False, reason=f"issue {number}")


def linear() -> nn.Module:
    return nn.Linear(2, 2)


@issue("57.18")
def test_18_the_transport_of_shared_memory_is_one_object_with_the_registered_buffers() -> None:
    weights = TensorDict({"weight": torch.ones(2)})
    with wsync.SharedMemWeightSyncScheme({"policy": weights}) as scheme:
        transport: Any = scheme.create_transport(None)
        assert scheme.create_transport(None) is transport
        assert [one["weight"].tolist() for one in transport.unique_weights] == [[1.0, 1.0]]


@issue("57.19")
def test_19_a_lazy_policy_is_initialised_by_an_observation() -> None:
    from collectors import Collector, GymEnv

    policy = nn.LazyLinear(2)
    with Collector(lambda: GymEnv("CartPole-v1"), policy, frames_per_batch=4) as collector:
        collector.update_policy_weights_()
        assert next(collector).numel() == 4 and policy.in_features == 4


@issue("57.20")
def test_20_the_newest_pages_order_and_what_exists_before_init() -> None:
    by_position: Any = wsync.SharedMemWeightSyncScheme
    assert by_position("state_dict", False).strategy == "state_dict"
    with pytest.raises(RuntimeError, match="init_on_sender"):
        wsync.NoWeightSyncScheme().get_sender()


def receive_under_signals(state: WorkerState, last: int) -> int:
    """Receive until version ``last``, while a handler raises every two milliseconds; how often it did."""
    struck = 0

    def strike(*_: object) -> None:
        raise TimeoutError("struck")

    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        while True:
            try:
                while state.schemes["policy"].version < last:
                    state.schemes["policy"].receive(1.0)
                    with wsync.gate():
                        pass
                break
            except (TimeoutError, wsync.SyncTimeout):
                struck += 1
    finally:
        while True:
            with suppress(TimeoutError):
                signal.setitimer(signal.ITIMER_REAL, 0)
                break
    return struck


@issue("59.8")
def test_8_an_answer_that_a_signal_swallowed_is_made_up_for(backend: BuiltIn) -> None:
    try:
        with backend.connected(1, timeout=1.0) as session:
            session.workers[0].start(receive_under_signals, 151)
            for value in range(2, 152):
                session.update(value)
            assert session.workers[0].result() > 0 and session.outputs() == [151]
    finally:  # the worker may be struck for ever
        with suppress(WorkerError):
            backend.pool.close()
