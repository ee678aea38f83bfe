"""What only shared memory has: registered weights, slots per worker, and memory that processes share."""

from __future__ import annotations

import pytest
from backends import SharedMemory
from tensordict import TensorDict
from workers_here import connect, make_worker, model_of, weights_of

import wsync
from wsync.testing import WorkerPool
from wsync.testing.commands import WorkerState
from wsync.testing.models import Small, fill


@pytest.fixture
def shared(pool: WorkerPool) -> SharedMemory:
    SharedMemory.pool = pool
    return SharedMemory()


# --- buffers and slots ---


def test_without_auto_register_buffers_have_to_be_registered(shared: SharedMemory) -> None:
    with (
        shared.connected(1, auto_register=False, init={}) as session,
        pytest.raises(wsync.NotConnected, match="register_shared_weights"),
    ):
        session.send(2)
    buffers = TensorDict.from_module(model_of(0)).data.clone()
    with wsync.SharedMemWeightSyncScheme(auto_register=False, timeout=20.0) as sender:
        sender.register_shared_weights("policy", buffers)
        sender.init_on_sender("policy", num_workers=1)
        with make_worker(sender, 0) as worker:
            connect(sender.connect, worker)
            sender.send(model_of(5))
            assert weights_of(worker) == [5, 5] and buffers["bias"].item() == 5


def test_the_weights_of_a_sender_without_a_model_are_those_it_has_published(shared: SharedMemory) -> None:
    with shared.connected(strategy="state_dict", init={}) as session:
        assert session.scheme.weights is None
        for value in (5.0, 6.0):
            session.send(value)
            assert session.scheme.weights["weight"].tolist() == [value] * 4
        session.scheme.send({0: fill(Small(), 7), 1: fill(Small(), 8)})
        assert session.scheme.weights is None


def test_slots_per_worker(shared: SharedMemory) -> None:
    with shared.connected(per_worker_weights=True) as session:
        for value in range(2, 8):
            session.scheme.send({0: fill(Small(), value), 1: fill(Small(), value * 10)})
            assert session.outputs() == [value, value * 10]
        session.send(3)
        assert session.outputs() == [3, 3]


# --- forwards and slots ---


@pytest.mark.parametrize("action", ["shutdown", "receive", "connect"])
def test_a_call_that_would_wait_for_its_own_forward_is_an_error(shared: SharedMemory, action: str) -> None:
    with shared.connected(1) as session:
        assert f"{action}() outside any forward" in session.workers[0].call(call_inside_the_gate, action)
        session.send(2)
        assert session.outputs() == [2]


def call_inside_the_gate(state: WorkerState, action: str) -> str:
    scheme = state.schemes["policy"]
    with wsync.gate(), pytest.raises(RuntimeError) as raised:
        getattr(scheme, action)()
    return str(raised.value)
