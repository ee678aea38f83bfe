"""Behaviour that the reference documents name and that no other test holds: see ``tests/api_rows.md``."""

import gc
import inspect
import os
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from backends import BuiltIn, Multiprocess, SharedMemory, needs_arena
from rpc_workers import Rpc
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode
from workers_here import connect, make_worker, model_of, weights_of

import wsync
from wsync.testing import WorkerPool, commands
from wsync.testing.commands import WorkerState
from wsync.testing.hooks import TIMEOUT
from wsync.testing.models import Small, fill

REQUIRED = inspect.Parameter.empty


def properties(state: WorkerState, model_id: str) -> tuple[Any, ...]:
    scheme = state.schemes[model_id]
    assert isinstance(scheme.receiver_transport, wsync.TransportBackend) and scheme.model is state.models[model_id]
    given = scheme.model_id, scheme.worker_idx, scheme.context, scheme.sender_transports, scheme.shared_transport
    return *given, scheme.weights["weight"].tolist()


def initialise_with(state: WorkerState, scheme: wsync.WeightSyncScheme, worker_idx: int) -> dict[str, Any]:
    """``init_on_receiver`` with a context; the model keeps its weights."""
    state.schemes["policy"], state.models["policy"] = scheme, fill(Small(), 8)
    context = SimpleNamespace(policy=state.models["policy"])
    before = commands.wsync_threads()
    scheme.init_on_receiver(model_id="policy", context=context, worker_idx=worker_idx)
    assert scheme.context is context and scheme.model is context.policy
    assert commands.wsync_threads() == before and state.models["policy"]().tolist() == [8.0] * 4
    return {"version": scheme.version, "model_id": scheme.model_id, "worker_idx": scheme.worker_idx}


def apply(state: WorkerState, value: float, inplace: bool) -> list[float]:
    state.schemes["policy"].apply_weights({"weight": torch.full((4,), value)}, inplace=inplace)
    return state.models["policy"]().tolist()


@pytest.mark.parametrize(
    ("make", "documented"),
    [
        (wsync.SharedMemWeightSyncScheme, {"policy_weights": None, "strategy": "tensordict", "auto_register": True}),
        (wsync.MultiProcessWeightSyncScheme, {"strategy": "tensordict", "sync": True}),
        (wsync.DistributedWeightSyncScheme, {"backend": "gloo", "sync": True, "timeout": 60.0}),
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
        for worker in workers:
            worker.start(commands.connect)
        scheme.connect()
        assert workers.results() == [1, 1]
        assert [output[0] for output in workers.call(commands.output)] == [5, 5]


class TensorOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(operation))
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", ["model", "weights", "params_map"])
def test_init_on_the_sender_copies_no_weights(backend: BuiltIn, form: str) -> None:
    model = fill(Small(), 1)
    given: dict[str, Any] = {"model": model, "weights": model.state_dict(), "params_map": {0: model, 1: model}}
    with backend.make_scheme() as scheme, TensorOperations() as operations:
        scheme.init_on_sender("policy", num_workers=2, **{form: given[form]})
        assert [name for name in operations.names if "detach" not in name] == []


def join_as(
    state: WorkerState, scheme: wsync.WeightSyncScheme, given: int | None, index: int, connect: str = "connect"
) -> int | None:
    """Initialise with one index or none, and connect with another; returns the index that the scheme has."""
    state.schemes["policy"], state.models["policy"] = scheme, Small()
    scheme.init_on_receiver("policy", model=state.models["policy"], worker_idx=given)
    getattr(scheme, connect)(worker_idx=index)
    return scheme.worker_idx


def test_connect_may_be_given_the_workers_index(backend: BuiltIn) -> None:
    with backend.workers(2) as workers, backend.make_scheme(timeout=TIMEOUT) as scheme:
        scheme.init_on_sender("policy", params_map={0: fill(Small(), 5), 1: fill(Small(), 6)})
        workers[0].start(join_as, scheme, None, 1)
        workers[1].start(join_as, scheme, 1, 0)  # it takes precedence
        scheme.connect()
        assert workers.results() == [1, 0]
        assert [output[0] for output in workers.call(commands.output)] == [6, 5]


def test_properties_of_both_ends(backend: BuiltIn) -> None:
    scheme = backend.make_scheme()
    assert (scheme.context, scheme.model, scheme.model_id, scheme.worker_idx) == (None, None, None, None)
    assert (scheme.weights, scheme.receiver_transport, scheme.shared_transport) == (None, None, None)
    assert scheme.sender_transports == {}
    with backend.connected(model_id="actor") as session:
        scheme = session.scheme
        assert scheme.model is session.model and scheme.model_id == "actor" and scheme.worker_idx is None
        assert scheme.weights["weight"].tolist() == [1.0] * 4 and scheme.receiver_transport is None
        assert sorted(scheme.sender_transports) == [0, 1]
        transports = [*scheme.sender_transports.values(), scheme.shared_transport]
        assert all(isinstance(transport, wsync.TransportBackend) for transport in transports)
        for worker_idx, found in enumerate(session.workers.call(properties, "actor")):
            assert found == ("actor", worker_idx, None, {}, None, [1.0] * 4)


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


@needs_arena
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
    """A ``device_map_fn``: maps weights to new ones, and counts those of other workers that are still in memory."""

    def __init__(self, as_module: bool) -> None:
        self.as_module = as_module
        self.made: list[weakref.ref[np.ndarray]] = []  # a tensor may be gone, and a view of it keep its memory
        self.alive: list[int] = []

    def __call__(self, worker_idx: int, weights: Any) -> Any:
        self.alive.append(sum(made() is not None for made in self.made))
        memory = weights["weight"].numpy() + worker_idx
        self.made.append(weakref.ref(memory))
        mapped = {"weight": torch.from_numpy(memory)}
        if not self.as_module:
            return mapped
        model = Small()
        model.load_state_dict(mapped, assign=True)
        return model


@pytest.mark.parametrize("as_module", [False, True])
def test_weights_mapped_for_a_worker_are_made_when_they_are_sent(pool: WorkerPool, as_module: bool) -> None:
    mapped = Mapped(as_module)
    Multiprocess.pool, init = pool, {"model": fill(Small(), 1), "device_map_fn": mapped}
    with Multiprocess().connected(3, init=init, strategy="state_dict") as session:
        assert session.outputs() == [1, 2, 3]
        session.scheme.send()
        assert len(mapped.made) == 6 and all(made() is None for made in mapped.made)
        assert mapped.alive == [0] * 6  # one worker's at a time


def test_nothing_travels_at_the_connect_of_rpc() -> None:
    Rpc.pool = Rpc.pool_type()
    try:
        with Rpc().workers(1) as workers, Rpc().make_scheme(timeout=TIMEOUT) as scheme:
            scheme.init_on_sender("policy", model=fill(Small(), 6), num_workers=1)
            workers[0].start(commands.join, scheme, Small, 0, "policy")
            scheme.connect()
            assert workers[0].result() == 0
            assert workers[0].call(commands.output)[0] == 0.0
            scheme.send()
            assert workers[0].call(commands.output)[0] == 6.0
    finally:
        Rpc.pool.close()


def test_devices_say_how_many_workers_there_are() -> None:
    with wsync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", model=Small(), devices=[torch.device("cpu")] * 3)
        assert scheme.num_workers == 3


def test_synchronize_weights_connects(backend: BuiltIn) -> None:
    with backend.workers(1) as workers, backend.make_scheme(timeout=TIMEOUT) as scheme:
        scheme.init_on_sender("policy", num_workers=1)
        workers[0].start(join_as, scheme, None, 0, "synchronize_weights")
        scheme.synchronize_weights(weights=fill(Small(), 4))
        assert (workers[0].result(), workers[0].call(commands.output)[0]) == (0, 4)


def memory_files() -> set[str]:
    links = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    return {link for link in links if link.startswith("/memfd:wsync")}


def test_shutdown_closes_memory_without_the_garbage_collector(backend: BuiltIn) -> None:
    gc.collect()
    before = memory_files()
    gc.disable()
    try:
        with backend.connected() as session:
            session.update(2)
        assert memory_files() == before
    finally:
        gc.enable()


# --- what only shared memory has ---


@pytest.fixture
def shared(pool: WorkerPool) -> SharedMemory:
    SharedMemory.pool = pool
    return SharedMemory()


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
