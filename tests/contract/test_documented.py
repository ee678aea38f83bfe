"""Behaviour that the reference documents name and that no other test holds: see ``docs/api.md``."""

from __future__ import annotations

import inspect
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backends import BuiltIn, SharedMemory
from rpc_workers import Rpc
from tensordict import TensorDict
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

import wsync
from wsync.testing import WorkerPool, commands
from wsync.testing.commands import WorkerState
from wsync.testing.models import Small, fill

REQUIRED = inspect.Parameter.empty
TIMEOUT = 60.0
"""Seconds for what takes milliseconds."""


def threads(state: WorkerState) -> int:
    """How many threads of wsync this worker has."""
    return len([thread for thread in threading.enumerate() if thread.name.startswith(commands.THREAD_PREFIX)])


def properties(state: WorkerState) -> dict[str, Any]:
    """What a receiver answers."""
    scheme = state.schemes["policy"]
    assert isinstance(scheme.receiver_transport, wsync.TransportBackend | None)
    return {
        "model": scheme.model is state.models["policy"],
        "model_id": scheme.model_id,
        "worker_idx": scheme.worker_idx,
        "context": scheme.context,
        "sender_transports": scheme.sender_transports,
        "shared_transport": scheme.shared_transport,
        "receiver_transport": scheme.receiver_transport is not None,
        "weights": None if scheme.weights is None else scheme.weights["weight"].tolist(),
    }


def initialise_with(state: WorkerState, scheme: wsync.WeightSyncScheme, worker_idx: int) -> dict[str, Any]:
    """``init_on_receiver`` with a context; the model keeps its weights."""
    state.schemes["policy"], state.models["policy"] = scheme, fill(Small(), 8)
    context = SimpleNamespace(policy=state.models["policy"])
    before = threads(state)
    scheme.init_on_receiver(model_id="policy", context=context, worker_idx=worker_idx)
    assert scheme.context is context and scheme.model is context.policy
    assert threads(state) == before and state.models["policy"]().tolist() == [8.0] * 4
    return {"version": scheme.version, "model_id": scheme.model_id, "worker_idx": scheme.worker_idx}


def apply(state: WorkerState, value: float, inplace: bool) -> list[float]:
    """``apply_weights`` of the worker's scheme."""
    state.schemes["policy"].apply_weights({"weight": torch.full((4,), value)}, inplace=inplace)
    return state.models["policy"]().tolist()


@pytest.mark.parametrize(
    ("make", "documented"),
    [
        (
            wsync.SharedMemWeightSyncScheme,
            {"policy_weights": None, "strategy": "tensordict", "auto_register": True},
        ),
        (wsync.MultiProcessWeightSyncScheme, {"strategy": "tensordict", "sync": True}),
        (wsync.WeightSyncScheme.send, {"weights": None, "worker_ids": None}),
        (wsync.WeightSyncScheme.send_async, {"weights": None, "worker_ids": None}),
        (wsync.WeightSyncScheme.receive, {"timeout": None}),
        (wsync.WeightSyncScheme.connect, {"worker_idx": None, "weights": None}),
        (wsync.WeightSyncScheme.apply_weights, {"weights": REQUIRED, "inplace": True}),
        (wsync.SharedMemWeightSyncScheme.register_shared_weights, {"model_id": REQUIRED, "weights": REQUIRED}),
    ],
)
def test_arguments_have_the_documented_order_and_defaults(make: Callable[..., Any], documented: dict[str, Any]) -> None:
    found = {name: given.default for name, given in inspect.signature(make).parameters.items() if name != "self"}
    assert list(found.items())[: len(documented)] == list(documented.items())


def test_init_communicates_nothing_and_the_scheme_can_be_pickled_after_it(backend: BuiltIn) -> None:
    model = fill(Small(), 5)
    with backend.workers(2) as workers, backend.make_scheme(timeout=TIMEOUT) as scheme:
        scheme.init_on_sender(model_id="policy", context=SimpleNamespace(policy=model), num_workers=2)
        assert scheme.version == 0 and scheme.model is model and model().tolist() == [5.0] * 4
        copies = [pickle.loads(pickle.dumps(scheme)) for _ in workers]
        for worker, worker_idx, copy in zip(workers, range(2), copies, strict=True):
            expected = {"version": 0, "model_id": "policy", "worker_idx": worker_idx}
            assert worker.call(initialise_with, copy, worker_idx) == expected
        workers.start(commands.connect)
        scheme.connect()
        assert workers.results() == [1, 1]
        assert [output[0] for output in workers.call(commands.output)] == [5, 5]


def test_properties_of_both_ends(backend: BuiltIn) -> None:
    scheme = backend.make_scheme()
    assert (scheme.context, scheme.model, scheme.model_id, scheme.worker_idx) == (None, None, None, None)
    assert (scheme.weights, scheme.receiver_transport, scheme.shared_transport) == (None, None, None)
    assert scheme.sender_transports == {}
    with backend.connected() as session:
        scheme = session.scheme
        assert scheme.model is session.model and scheme.model_id == "policy" and scheme.worker_idx is None
        assert scheme.weights["weight"].tolist() == [1.0] * 4 and scheme.receiver_transport is None
        assert sorted(scheme.sender_transports) == [0, 1]
        transports = [*scheme.sender_transports.values(), scheme.shared_transport]
        assert all(isinstance(transport, wsync.TransportBackend) for transport in transports)
        for worker_idx, found in enumerate(session.workers.call(properties)):
            assert found == {
                "model": True,
                "model_id": "policy",
                "worker_idx": worker_idx,
                "context": None,
                "sender_transports": {},
                "shared_transport": None,
                "receiver_transport": True,
                "weights": [1.0] * 4,
            }


@pytest.mark.parametrize("inplace", [True, False])
def test_weights_are_applied_at_either_end_without_a_send(backend: BuiltIn, inplace: bool) -> None:
    with backend.connected() as session:
        assert session.workers[0].call(apply, 7.0, inplace) == [7.0] * 4
        assert session.outputs() == [7, 1]
        memory = session.model.weight.data_ptr()
        session.scheme.apply_weights(fill(Small(), 3), inplace=inplace)
        assert session.model().tolist() == [3.0] * 4 and session.outputs() == [7, 1]
        assert (session.model.weight.data_ptr() == memory) is inplace
        session.send(4)
        assert session.outputs() == [4, 4]


def test_a_background_thread_receives_from_connect_to_shutdown(backend: BuiltIn) -> None:
    with backend.connected(1) as session:
        assert session.workers[0].call(threads) > 0
        session.update(2)  # the worker makes no call for it
        assert session.outputs() == [2]
        assert session.workers[0].call(commands.shutdown) == []
        assert session.outputs() == [2]  # the model keeps its weights


def test_bound_workers_read_one_memory(pool: WorkerPool) -> None:
    SharedMemory.pool = pool
    with SharedMemory().connected() as session:
        transport = session.scheme.shared_transport
        assert isinstance(transport, wsync.SharedMemTransport)
        (buffers,) = transport.unique_weights
        buffers["weight"].fill_(9.0)
        assert session.outputs() == [9, 9]
        assert session.model().tolist() == [1.0] * 4  # the trainer's own is apart


class Mapped:
    """A ``device_map_fn``: maps weights to new ones, and counts those of other workers that still exist."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[int] = []

    def __call__(self, worker_idx: int, weights: Any) -> Any:
        self.alive.append(sum(made() is not None for made in self.made))
        mapped = {name: value + worker_idx for name, value in weights.items()}
        self.made += [weakref.ref(value) for value in mapped.values()]
        return mapped


def test_weights_mapped_for_a_worker_are_made_when_they_are_sent(pool: WorkerPool) -> None:
    mapped = Mapped()
    with pool.group(3) as workers, wsync.MultiProcessWeightSyncScheme("state_dict", timeout=TIMEOUT) as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 1), device_map_fn=mapped, num_workers=3)
        assert mapped.made == []
        for worker_idx, worker in enumerate(workers):
            worker.start(commands.join, scheme, Small, worker_idx, "policy")
        scheme.connect()
        workers.results()
        assert [output[0] for output in workers.call(commands.output)] == [1, 2, 3]
        scheme.send()
        assert all(made() is None for made in mapped.made) and max(mapped.alive) <= 2


def test_nothing_travels_at_the_connect_of_rpc_and_its_workers_have_no_thread() -> None:
    Rpc.pool = Rpc.pool_type()
    try:
        with Rpc().workers(1) as workers, Rpc().make_scheme(timeout=TIMEOUT) as scheme:
            scheme.init_on_sender("policy", model=fill(Small(), 6), num_workers=1)
            workers[0].start(commands.join, scheme, Small, 0, "policy")
            scheme.connect()
            assert workers[0].result() == 0
            assert workers[0].call(commands.output)[0] == 0.0
            scheme.send()
            assert workers[0].call(commands.output)[0] == 6.0 and workers[0].call(threads) == 0
    finally:
        Rpc.pool.close()


@pytest.fixture
def store() -> Iterator[Any]:
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def follow_group(state: WorkerState, kind: type[Any], port: int) -> bool:
    """Receive by a transport of ``kind`` without a scheme, before anything is sent; returns whether it timed out."""
    model = nn.Linear(4, 2)
    buffer = TensorDict.from_module(model).data.clone()
    strategy = wsync.WeightStrategy("tensordict")
    transport = kind(store=TCPStore("127.0.0.1", port, is_master=False))
    transport.setup_connection_and_weights_on_receiver(worker_idx=0, weights=buffer, model=model, strategy=strategy)
    state.kept["transport"] = transport, buffer, model, strategy
    return all(
        transport.receive_weights(timeout=0.02, weights=buffer, model=model, strategy=strategy) is None
        for _ in range(3)
    )


def follow_on(state: WorkerState) -> tuple[list[float], list[float]]:
    """Receive the next version, without a limit of time."""
    transport, buffer, model, strategy = state.kept["transport"]
    assert transport.receive_weights(timeout=None, weights=buffer, model=model, strategy=strategy) is not None
    return model.bias.tolist(), buffer["bias"].tolist()


@pytest.mark.parametrize("kind", [wsync.DistributedTransport, wsync.RPCTransport, wsync.RayTransport])
def test_a_transport_over_a_group_returns_none_at_its_timeout(kind: type[Any], pool: WorkerPool, store: Any) -> None:
    model = nn.Linear(4, 2)
    with pool.group(1) as workers:
        workers[0].start(follow_group, kind, store.port)
        transport = kind(weights_buffer=model, store=store)
        transport.setup_connection_and_weights_on_sender()
        assert workers[0].result()
        nn.init.constant_(model.bias, 3.0)
        transport.send_weights(model)  # the receive that has timed out takes it
        assert workers[0].call(follow_on) == ([3.0, 3.0], [3.0, 3.0])
        workers[0].start(follow_on)
        nn.init.constant_(model.bias, 4.0)
        transport.send_weights(model.state_dict())
        assert workers[0].result() == ([4.0, 4.0], [4.0, 4.0])


def follow_shared(state: WorkerState, transport: wsync.SharedMemTransport) -> list[Any]:
    """Receive the version that there is, then none, by a shared-memory transport without a scheme."""
    model = nn.Linear(4, 2)
    received = [transport.receive_weights(timeout=TIMEOUT, model=model), transport.receive_weights(timeout=0.02)]
    return [value is not None for value in received] + [model.bias.tolist()]


def test_a_shared_memory_transport_without_a_scheme() -> None:
    model, own = nn.Linear(4, 2), WorkerState()
    transport = wsync.SharedMemTransport()
    with pytest.raises(wsync.NotConnected, match="register_weights"):
        transport.send_weights(model)
    transport.register_weights(model)
    nn.init.constant_(model.bias, 2.0)
    transport.send_weights(model)
    assert follow_shared(own, transport) == [True, False, [2.0, 2.0]]
    assert [list(weights["bias"]) for weights in transport.unique_weights] == [[2.0, 2.0]]
