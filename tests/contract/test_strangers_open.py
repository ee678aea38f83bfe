"""What strangers hit in ``wsync`` and is open: points of issues 57 and 59, by their inputs, expected to fail."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import Any

import pytest
import torch
from backends import BuiltIn, SharedMemoryPublished
from tensordict import TensorDict
from test_strangers import act, joined
from torch import nn
from workers_here import make_worker, model_of

import wsync
from wsync.testing import WorkerError, WorkerPool
from wsync.testing.commands import WorkerState
from wsync.testing.models import fill


def issue(number: str) -> pytest.MarkDecorator:
    """An expected failure, until the rebuilt core takes it."""
    return pytest.mark.xfail(strict=False, reason=f"issue {number}")


def export_while_pending(state: WorkerState) -> list[float]:
    """Export the model when an update is pending; return its output."""
    model: Any = state.models["policy"]
    torch.export.export(model, (torch.ones(2),))
    return model(torch.ones(2)).tolist()


def linear() -> nn.Module:
    return nn.Linear(2, 2)


@issue("57.5")
def test_5_an_update_is_not_installed_inside_a_foreign_mode(pool: WorkerPool) -> None:
    SharedMemoryPublished.pool = pool
    source = fill(nn.Linear(2, 2), 1)
    with joined(SharedMemoryPublished(), source, linear) as (scheme, (worker,)):
        scheme.send(fill(source, 2))
        assert worker.call(export_while_pending) == [6.0, 6.0]
        scheme.send(fill(source, 3))
        assert worker.call(act) == [9.0, 9.0]


@issue("57.15")
def test_15_both_ends_may_connect_on_first_use() -> None:
    with wsync.SharedMemWeightSyncScheme(timeout=20.0) as sender:
        sender.init_on_sender("policy", model=model_of(1), num_workers=1)
        sender.connect(wait=False)  # type: ignore[call-arg]
        with make_worker(sender, 0) as worker:
            worker.connect(wait=False)  # type: ignore[call-arg]
            sender.send(model_of(2))
            assert worker.model(torch.ones(2)).item() == 6


@issue("57.18")
def test_18_the_transport_of_shared_memory_is_one_object_with_the_registered_buffers() -> None:
    weights = TensorDict({"weight": torch.ones(2)})
    with wsync.SharedMemWeightSyncScheme({"policy": weights}) as scheme:
        transport: Any = scheme.create_transport(None)
        assert scheme.create_transport(None) is transport
        assert [one["weight"].tolist() for one in transport.unique_weights] == [[1.0, 1.0]]


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
