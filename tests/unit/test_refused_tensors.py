"""Tensors and extra state that cannot be carried: the error names them, at either end, at once or later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from wsync import LayoutMismatch, MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, WorkerFailed
from wsync.transforms import Cast, Fuse, QuantizeInt8, Rename, Select, Split
from wsync.transforms.chain import compose

pytestmark = pytest.mark.usefixtures("group")
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


def without_bias(model: Any) -> None:
    model.layer.bias = None


def meta_bias(model: Any) -> None:
    model.layer.bias = nn.Parameter(torch.zeros(2, device="meta"))


def sparse_bias(model: Any) -> None:
    model.layer.bias = nn.Parameter(torch.ones(2).to_sparse())


def compressed_weight(model: Any) -> None:
    model.layer.weight = nn.Parameter(torch.eye(2).to_sparse_csr())


def quantised_bias(model: Any) -> None:
    del model.layer.bias
    model.layer.register_buffer("bias", torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8))


def nested_bias(model: Any) -> None:
    parts = [torch.zeros(1), torch.zeros(2)]
    model.layer.bias = nn.Parameter(torch.nested.nested_tensor(parts, layout=torch.jagged))


def sharded(model: Any) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


CASES = [
    (without_bias, "'layer.bias'"),
    (meta_bias, "'layer.bias' has no .*meta device"),
    (sparse_bias, "'layer.bias' is sparse"),
    (compressed_weight, "'layer.weight' is sparse"),
    (quantised_bias, "'layer.bias' is quantised"),
    (nested_bias, "'layer.bias' is nested"),
    (sharded, r"a shard of 'layer\.\w+', 'layer\.\w+' of .*\(DTensor\)"),
]


@pytest.fixture(params=[SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize(("change", "problem"), CASES)
def test_first_weights(kind: Any, change: Callable[[Any], None], problem: str) -> None:
    odd = Policy()
    change(odd)
    for source, model in ((odd, Policy()), (Policy(), odd)):
        with pytest.raises(LayoutMismatch, match=problem), kind(timeout=5.0) as scheme:
            scheme.init_in_process("policy", model, source)


@pytest.mark.parametrize(("change", "problem"), CASES)
def test_weights_that_change_later(kind: Any, change: Callable[[Any], None], problem: str) -> None:
    source, model = Policy(), Policy()
    with kind(timeout=5.0) as scheme:
        scheme.init_in_process("policy", model, source)
        scheme.send()
        before = model.layer.weight.detach().clone()
        nn.init.constant_(source.layer.weight, 9.0)
        change(source)
        for _ in range(2):
            with pytest.raises(LayoutMismatch, match=problem):
                scheme.send()
        assert torch.equal(model.layer.weight, before)
        source.layer = Policy().layer
        scheme.send()
        assert torch.equal(model.layer.weight, source.layer.weight)
        change(model)
        with pytest.raises(WorkerFailed, match=f"(?s)LayoutMismatch.*{problem}"):
            scheme.send()


class Counting(nn.Module):
    """One parameter, and any extra state."""

    def __init__(self, state: Any = 0) -> None:
        super().__init__()
        self.weight, self.state = nn.Parameter(torch.zeros(2)), state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ArithmeticError("not this one")


@pytest.mark.parametrize("state", [lambda: None, Unpicklable()])
def test_extra_state_that_cannot_be_pickled_is_named(kind: Any, state: Any) -> None:
    source, model = (nn.Sequential(Counting(1), Counting(2)) for _ in range(2))
    with kind(timeout=5.0) as scheme:
        scheme.init_in_process("policy", model, source)
        nn.init.constant_(source[0].weight, 9.0)
        source[1].state = state
        with pytest.raises(LayoutMismatch, match=r"extra state cannot be pickled: '1\._extra_state' \("):
            scheme.send()
        assert model[0].weight[0] == 0 and model[1].state == 2
        source[1].state = 3
        scheme.send()
        assert model[0].weight[0] == 9 and model[1].state == 3


# --- sharded weights ---

GATHER = r"DTensor.*get_model_state_dict\(model, .*full_state_dict=True.* on every rank, .* from rank 0"


def sharded_policy() -> Policy:
    model = Policy()
    sharded(model)
    return model


def forms_of(model: nn.Module) -> list[Any]:
    state = model.state_dict()
    return [model, state, TensorDict.from_module(model), TensorDict(state), {0: model}, {0: state}]


@pytest.mark.parametrize("form", range(6))
def test_sharded_weights_are_refused_in_every_form(kind: Any, form: int) -> None:
    """As the first weights, and after the same form of whole weights has enabled the fast path."""
    whole, model = Policy(), Policy()
    with kind(timeout=5.0) as scheme:
        scheme.init_in_process("policy", model)
        with pytest.raises(LayoutMismatch, match=GATHER):
            scheme.send(forms_of(sharded_policy())[form])
        for _ in range(2):
            scheme.send(forms_of(whole)[form])
        before = scheme.version
        with pytest.raises(LayoutMismatch, match=GATHER):
            scheme.send(forms_of(sharded_policy())[form])
        with pytest.raises(LayoutMismatch, match=GATHER):
            scheme.send_async(forms_of(sharded_policy())[form])
        assert scheme.version == before and torch.equal(model.layer.weight, whole.layer.weight)
        other = sharded_policy()
        scheme.send(get_model_state_dict(other, options=WHOLE))
        assert torch.equal(model.layer.weight, other.layer.weight.full_tensor())  # type: ignore


def test_a_sharded_part_is_refused(kind: Any) -> None:
    with kind(timeout=5.0) as scheme:
        scheme.init_in_process("policy", Policy(), Policy())
        scheme.send()
        with pytest.raises(LayoutMismatch, match=GATHER):
            scheme.send({"layer.weight": sharded_policy().layer.weight}, partial=True)


TRANSFORMS = [
    Cast("bfloat16"),
    QuantizeInt8(),
    Fuse({"joined": ["layer.weight", "layer.weight"]}),
    Split({"layer.weight": ["layer.upper", "layer.lower"]}),
]


@pytest.mark.parametrize("transform", [*TRANSFORMS, Rename({"layer.weight": "layer.other"})])
def test_sharded_weights_are_refused_before_they_are_transformed(kind: Any, transform: Any) -> None:
    """PyTorch might wait in the transform for the other ranks."""
    with pytest.raises(LayoutMismatch, match=GATHER), kind(timeout=5.0, send_transform=transform) as scheme:
        scheme.init_in_process("policy", Policy(), sharded_policy())


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_weights_that_are_sharded_later_are_refused_by_a_transform(transform: Any) -> None:
    chain = compose(transform, "send_transform")
    assert chain is not None
    chain(dict(Policy().named_parameters()))
    with pytest.raises(LayoutMismatch, match=GATHER):
        chain(dict(sharded_policy().named_parameters()))


def test_a_whole_part_of_a_model_with_shards_is_carried(kind: Any) -> None:
    class Adapted(Policy):
        def __init__(self) -> None:
            super().__init__()
            self.adapter = nn.Linear(2, 2)

    source, model = Adapted(), Adapted()
    sharded(source.layer)
    with kind(timeout=5.0, send_transform=Select("adapter")) as scheme:
        scheme.init_in_process("policy", model, source)
        nn.init.constant_(source.adapter.weight, 9.0)
        scheme.send()
        assert torch.equal(model.adapter.weight, source.adapter.weight)
