"""What only shared memory has: registered weights, slots per worker, and memory that processes share."""

from __future__ import annotations

import threading
from itertools import count

import pytest
import torch
from backends import SharedMemory, SharedMemoryPublished
from tensordict import TensorDict

import wsync
from wsync.testing import WorkerPool, commands
from wsync.testing.commands import WorkerState
from wsync.testing.models import Small, TwoReads, fill


@pytest.fixture
def shared(pool: WorkerPool) -> SharedMemory:
    SharedMemory.pool = pool
    return SharedMemory()


@pytest.fixture
def published(pool: WorkerPool) -> SharedMemoryPublished:
    SharedMemoryPublished.pool = pool
    return SharedMemoryPublished()


# --- buffers and slots ---


def test_without_auto_register_buffers_have_to_be_registered(shared: SharedMemory) -> None:
    with (
        shared.connected(1, auto_register=False, init={}) as session,
        pytest.raises(wsync.NotConnected, match="register_shared_weights"),
    ):
        session.send(2)


def test_registered_buffers_are_read_and_written(shared: SharedMemory) -> None:
    buffers = TensorDict({"weight": torch.ones(4)})
    with shared.workers(1) as workers, shared.make_scheme(auto_register=False, timeout=30.0) as scheme:
        assert isinstance(scheme, wsync.SharedMemWeightSyncScheme)
        scheme.register_shared_weights("policy", buffers)
        scheme.init_on_sender("policy", num_workers=1)
        workers[0].start(commands.join, scheme, Small, 0, "policy")
        scheme.connect()
        workers[0].result()
        assert workers[0].call(commands.output)[0] == 1
        buffers["weight"].fill_(2)
        scheme.send()
        assert workers[0].call(commands.output)[0] == 2
        scheme.send(fill(Small(), 3))
        assert workers[0].call(commands.output)[0] == 3 and buffers["weight"][0] == 3


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


def test_published_buffers_can_be_shared_by_the_trainer(shared: SharedMemory) -> None:
    with shared.connected(1) as session:
        for value in range(2, 8):
            transport = session.scheme.shared_transport
            assert isinstance(transport, wsync.SharedMemTransport)
            (buffers,) = transport.unique_weights
            assert buffers.share_memory_()["weight"][0] == value - 1
            made = session.scheme.create_transport()  # the same buffers: there is one transport
            assert isinstance(made, wsync.SharedMemTransport) and made.unique_weights[0]["weight"][0] == value - 1
            session.send(value)
            assert session.outputs() == [value]


@pytest.mark.parametrize("checksum", [True, False])
def test_a_byte_changed_in_shared_memory_is_noticed_with_a_checksum(shared: SharedMemory, checksum: bool) -> None:
    with shared.connected(1, checksum=checksum) as session:
        session.workers[0].stop()
        session.post(2)
        transport = session.scheme.shared_transport
        assert isinstance(transport, wsync.SharedMemTransport)
        transport.unique_weights[0]["weight"][1] = 77.0
        session.workers[0].resume()
        if checksum:
            with pytest.raises(wsync.WorkerFailed, match="corrupt"):
                session.scheme.wait_async()
        else:
            session.scheme.wait_async()
        assert session.workers[0].call(commands.output)[:2] == ([1.0, 1.0] if checksum else [2.0, 77.0])


# --- forwards and slots ---


def begin_forward_in_thread(state: WorkerState) -> None:
    """A thread reads the weights inside the gate, now and when it is told to end."""
    state.kept["end"], begun = threading.Event(), threading.Event()
    seen = state.kept["seen"] = []

    def forward() -> None:
        with wsync.gate():
            seen.append(state.models["policy"].weight.tolist())
            begun.set()
            state.kept["end"].wait()
            seen.append(state.models["policy"].weight.tolist())

    state.kept["thread"] = threading.Thread(target=forward, daemon=True)
    state.kept["thread"].start()
    begun.wait()


def end_forward_in_thread(state: WorkerState) -> list[list[float]]:
    state.kept["end"].set()
    state.kept["thread"].join()
    return state.kept["seen"]


def test_receive_ends_in_time_while_a_forward_runs(published: SharedMemoryPublished) -> None:
    with published.connected(1) as session:
        session.workers[0].call(begin_forward_in_thread)
        session.send(2)
        assert session.workers[0].call(commands.receive, 0.1) is None
        assert session.workers[0].call(end_forward_in_thread) == [[1.0] * 4] * 2
        assert session.workers[0].call(commands.receive, 20.0) is not None
        assert session.outputs() == [2]


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


def test_no_forward_is_torn_by_sends_while_buffers_are_registered(published: SharedMemoryPublished) -> None:
    weights = TensorDict.from_module(fill(TwoReads(), 1)).data.share_memory_()
    with published.connected(1, TwoReads, init={}, policy_weights={"policy": weights}) as session:
        session.workers[0].start(count_torn, 100)
        done = threading.Event()

        def send() -> None:
            for value in count(2):
                session.send(value)
                if done.is_set():
                    return

        trainer = threading.Thread(target=send)
        trainer.start()
        torn = session.workers[0].result()
        done.set()
        trainer.join()
        assert torn == 0


def count_torn(state: WorkerState, versions: int) -> int:
    """Forward until so many versions have acted; return how many forwards were torn."""
    torn, seen = 0, set[float]()
    while len(seen) < versions:
        low, high = state.models["policy"]().tolist()
        torn += low != high
        seen.add(low)
    return torn
