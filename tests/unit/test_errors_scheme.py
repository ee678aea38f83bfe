"""Schemes by name, their options, and one family of errors."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import wsync
from wsync.testing.models import Small, fill


def test_one_family() -> None:
    for kind in (wsync.LayoutMismatch, wsync.NotConnected, wsync.SyncTimeout, wsync.WorkerDied, wsync.WorkerFailed):
        assert issubclass(kind, wsync.WeightSyncError)
        error = pickle.loads(pickle.dumps(kind("the cause")))
        assert (error.workers, str(error)) == ({}, "the cause")
    assert issubclass(wsync.SyncTimeout, TimeoutError)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("shared_mem", wsync.SharedMemTransport),
        ("multiprocess", wsync.TransportBackend),
        ("distributed", wsync.DistributedTransport),
        ("rpc", wsync.RPCTransport),
        ("ray", wsync.RayTransport),
        ("none", wsync.TransportBackend),
    ],
)
def test_from_backend(name: str, kind: type[Any]) -> None:
    scheme = wsync.WeightSyncScheme.from_backend(name, strategy="state_dict", timeout=3.0)
    assert scheme.name == name and scheme.timeout == 3.0 and scheme.strategy.extract_as == "state_dict"
    assert isinstance(scheme.create_transport(), kind) and scheme.model_id is None  # before init
    scheme.shutdown()
    scheme.shutdown()


def test_bad_options() -> None:
    with pytest.raises(ValueError, match=r"distributed, http, multiprocess, none, ray, .*rpc, shared_mem"):
        wsync.WeightSyncScheme.from_backend("carrier_pigeon")
    with pytest.raises(ValueError, match="timeout"):
        wsync.SharedMemWeightSyncScheme(timeout=0)
    with pytest.raises(ValueError, match="installed"):
        wsync.SharedMemWeightSyncScheme(acknowledge="maybe")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="strategy"):
        wsync.MultiProcessWeightSyncScheme("json")


@pytest.mark.parametrize("model", [None, Small()])
def test_none_carries_nothing(model: Any) -> None:
    scheme = wsync.NoWeightSyncScheme()
    scheme.init_on_sender("policy", model=model, pipes=[])
    scheme.connect()
    scheme.continue_from(7)
    scheme.get_sender().send(Small())
    assert scheme.send() is None and scheme.version == 0
    assert scheme.receive() is False
    assert wsync.synchronize({scheme: nn.Linear(1, 1)}) == {}
    with wsync.NoWeightSyncScheme() as receiver:
        receiver.init_on_worker("policy", pipe=None, model=Small())
        assert receiver.pull() == 0 and receiver.get_receiver().receive(0.0) is False


def test_none_has_the_properties_and_transports() -> None:
    model, context = fill(Small(), 1), SimpleNamespace(policy=fill(Small(), 2))
    with wsync.NoWeightSyncScheme() as scheme:
        assert scheme.num_workers == 0 and scheme.weights is None
        scheme.init_on_sender("policy", context, model=model, num_workers=2)
        assert scheme.model is model and scheme.context is context and scheme.model_id == "policy"
        assert scheme.num_workers == 2 and list(scheme.sender_transports) == [0, 1] and scheme.worker_idx is None
        assert scheme.receiver_transport is None and scheme.version == 0 and scheme.strategy == "tensordict"
        transport = scheme.create_transport()
        assert isinstance(scheme.shared_transport, wsync.TransportBackend)
        transport.setup_connection_and_weights_on_sender()
        assert transport.send_weights(model) is None and transport.receive_weights(timeout=None) is None
        assert scheme.weights["weight"].tolist() == [1.0] * 4
        assert scheme.prepare_weights(None, "policy")["weight"].tolist() == [1.0] * 4
        assert pickle.loads(pickle.dumps(scheme)).model is None
    assert scheme.model is None


def test_none_leaves_the_weights_of_a_model_in_one_process() -> None:
    model, source = fill(Small(), 1), fill(Small(), 2)
    with wsync.NoWeightSyncScheme() as scheme:
        scheme.init_in_process("policy", model, source)
        scheme.send(source)
        assert scheme.model is model and model.weight.tolist() == [1.0] * 4


@pytest.mark.parametrize("name", ["tensordict", "state_dict"])
def test_a_strategy_is_equal_to_its_name(name: str) -> None:
    with wsync.SharedMemWeightSyncScheme(strategy=name) as scheme:  # pyright: ignore[reportArgumentType]
        assert scheme.strategy == name and name == scheme.strategy and scheme.strategy != "json"
        assert scheme.strategy == wsync.WeightStrategy(scheme.strategy.extract_as) and scheme.strategy != 3
        assert {scheme.strategy: 1}[wsync.WeightStrategy(scheme.strategy.extract_as)] == 1
