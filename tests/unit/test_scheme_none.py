"""The scheme that carries nothing has the interface of the others: transports, properties, local ``apply_weights``."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

import wsync
from wsync.testing.models import Small, fill


def test_a_sender_has_its_properties_and_transports() -> None:
    model, context = fill(Small(), 1), SimpleNamespace(policy=fill(Small(), 2))
    with wsync.NoWeightSyncScheme() as scheme:
        assert isinstance(scheme.create_transport(), wsync.TransportBackend)
        assert scheme.model_id is None and scheme.num_workers == 0 and scheme.weights is None
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


def test_in_one_process_the_model_keeps_its_weights() -> None:
    model, source = fill(Small(), 1), fill(Small(), 2)
    with wsync.NoWeightSyncScheme() as scheme:
        scheme.init_in_process("policy", model, source)
        scheme.send(source)
        assert scheme.model is model and model.weight.tolist() == [1.0] * 4


@pytest.mark.parametrize("name", ["shared_mem", "multiprocess", "distributed", "rpc", "ray", "none"])
def test_create_transport_comes_before_init(name: str) -> None:
    with wsync.WeightSyncScheme.from_backend(name) as scheme:
        assert isinstance(scheme.create_transport(), wsync.TransportBackend)
        assert scheme.model_id is None


@pytest.mark.parametrize("name", ["tensordict", "state_dict"])
def test_a_strategy_is_equal_to_its_name(name: str) -> None:
    with wsync.SharedMemWeightSyncScheme(strategy=name) as scheme:  # pyright: ignore[reportArgumentType]
        assert scheme.strategy == name and name == scheme.strategy and scheme.strategy != "json"
        assert scheme.strategy == wsync.WeightStrategy(scheme.strategy.extract_as) and scheme.strategy != 3
        assert {scheme.strategy: 1}[wsync.WeightStrategy(scheme.strategy.extract_as)] == 1
