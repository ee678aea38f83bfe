"""The scheme that carries nothing has the interface of the others: transports, properties, local ``apply_weights``."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch

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


def test_a_receiver_keeps_its_weights_until_it_applies_others_itself() -> None:
    context = SimpleNamespace(policy=fill(Small(), 2))
    with wsync.NoWeightSyncScheme(strategy="state_dict") as scheme:
        scheme.init_on_receiver("policy", context)
        scheme.connect(worker_idx=3)
        assert scheme.worker_idx == 3 and scheme.model is context.policy and scheme.receive(None) is False
        assert isinstance(scheme.receiver_transport, wsync.TransportBackend) and scheme.shared_transport is None
        assert context.policy.weight.tolist() == [2.0] * 4
        scheme.apply_weights({"weight": torch.full((4,), 5.0)})
        assert context.policy.weight.tolist() == [5.0] * 4 and scheme.weights["weight"].tolist() == [5.0] * 4
        with pytest.raises(wsync.LayoutMismatch, match="weight"):
            scheme.apply_weights({"weight": torch.zeros(3)})


def test_without_a_model_there_is_nothing_to_apply_weights_to() -> None:
    scheme = wsync.NoWeightSyncScheme()
    scheme.init_on_sender("policy")
    for call in (lambda: scheme.apply_weights({}), lambda: scheme.prepare_weights(None, "policy")):
        with pytest.raises(wsync.NotConnected):
            call()


def test_in_one_process_the_model_keeps_its_weights() -> None:
    model, source = fill(Small(), 1), fill(Small(), 2)
    with wsync.NoWeightSyncScheme() as scheme:
        scheme.init_in_process("policy", model, source)
        scheme.send(source)
        assert scheme.model is model and model.weight.tolist() == [1.0] * 4


def test_what_is_registered_is_the_import_string_of_a_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wsync.registry._BACKENDS", {**wsync.registered_backends()})
    for wrong in (wsync.NoWeightSyncScheme, "json", "json:"):
        with pytest.raises(ValueError, match=r"'mine' is an import string 'package.module:Class', not "):
            wsync.register_backend("mine", wrong)  # pyright: ignore[reportArgumentType]
    wsync.register_backend("mine", "json:dumps")
    with pytest.raises(TypeError, match="'mine' is registered as 'json:dumps', which is no subclass of"):
        wsync.WeightSyncScheme.from_backend("mine")


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
