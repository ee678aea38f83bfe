"""Weights that cannot be carried are refused with an error that names the tensors, at either end, at once or later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import BuiltIn
from small_models import TwoWeights
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import wsync
from wsync.testing import WorkerError, commands
from wsync.testing.models import Small, fill

pytestmark = pytest.mark.usefixtures("group")


class Policy(nn.Module):
    """A layer of four weights and two biases."""

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


def row_of_the_weight(model: Any) -> None:
    model.layer.bias = nn.Parameter(model.layer.weight.detach()[1])


def crossing_the_weight(model: Any) -> None:
    memory = torch.zeros(6)
    model.layer.weight, model.layer.bias = nn.Parameter(memory[:4].view(2, 2)), nn.Parameter(memory[3:5])


CASES = [
    (without_bias, "'layer.bias'"),
    (meta_bias, "'layer.bias'.*meta"),
    (sparse_bias, "'layer.bias'.*sparse"),
    (compressed_weight, "'layer.weight'.*sparse"),
    (quantised_bias, "'layer.bias'.*quantised"),
    (nested_bias, "'layer.bias'.*nested"),
    (sharded, r"'layer\.\w+'.*DTensor"),
]
OVERLAPS = [(row_of_the_weight, "'layer.bias'.*overlap"), (crossing_the_weight, "'layer.bias'.*overlap")]


@pytest.mark.parametrize(("change", "problem"), CASES + OVERLAPS)
def test_first_weights_that_cannot_be_carried(change: Callable[[Any], None], problem: str) -> None:
    odd = Policy()
    change(odd)
    for source, model in ((odd, Policy()), (Policy(), odd)):
        with pytest.raises(wsync.LayoutMismatch, match=problem), wsync.SharedMemWeightSyncScheme() as scheme:
            scheme.init_in_process("policy", model, source)


@pytest.mark.parametrize(("change", "problem"), CASES)
def test_weights_that_can_no_longer_be_carried(change: Callable[[Any], None], problem: str) -> None:
    source, model = Policy(), Policy()
    with wsync.MultiProcessWeightSyncScheme() as scheme:
        scheme.init_in_process("policy", model, source)
        scheme.send()
        before = model.layer.weight.detach().clone()
        nn.init.constant_(source.layer.weight, 9.0)
        change(source)
        for _ in range(2):
            with pytest.raises(wsync.LayoutMismatch, match=problem):
                scheme.send()
        assert torch.equal(model.layer.weight, before)
        source.layer = Policy().layer
        scheme.send()
        assert torch.equal(model.layer.weight, source.layer.weight)
        change(model)
        with pytest.raises(wsync.WorkerFailed, match=f"(?s)LayoutMismatch.*{problem}"):
            scheme.send()


class Overlapping(Small):
    """Two parameters that have two of their values in common."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(6)
        self.weight, self.other = nn.Parameter(memory[:4]), nn.Parameter(memory[2:])


def test_overlapping_parameters_of_a_worker_are_refused(backend: BuiltIn) -> None:
    overlap = r"(?s)'weight' and 'other'.*overlap"
    with backend.workers(1) as workers, backend.make_scheme(timeout=20.0) as scheme:
        scheme.init_on_sender("policy", model=fill(TwoWeights(), 1), num_workers=1)
        workers[0].start(commands.join, scheme, Overlapping, 0, "policy")
        with pytest.raises(wsync.WorkerFailed, match=overlap):
            scheme.connect()
        with pytest.raises(WorkerError, match=overlap):
            workers[0].result()


# --- tensors of one storage that can be carried ---


class Pair(nn.Module):
    """Two parameters that have the memory of these tensors."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)


def interleaved() -> Pair:
    memory = torch.zeros(3, 4)
    return Pair(memory[:, ::2], memory[:, 1::2])


def neighbours() -> Pair:
    memory = torch.zeros(6)
    return Pair(memory[:3], memory[3:])


@pytest.mark.parametrize("make", [interleaved, neighbours])
def test_tensors_of_one_storage_that_share_no_value_are_carried(make: Any) -> None:
    source, model = make(), make()
    with wsync.MultiProcessWeightSyncScheme() as scheme:
        scheme.init_in_process("policy", model, source)
        nn.init.constant_(source.first, 1.0)
        nn.init.constant_(source.second, 2.0)
        scheme.send()
        assert model.first.unique().tolist() == [1.0] and model.second.unique().tolist() == [2.0]


def transposed() -> Pair:
    memory = torch.zeros(2, 3)
    return Pair(memory, memory.t())


def test_views_of_exactly_the_same_bytes_take_values_that_agree() -> None:
    source, model = transposed(), transposed()
    with torch.no_grad():
        source.first.copy_(torch.arange(6.0).view(2, 3))
    wsync.WeightStrategy().apply_weights(model, source)
    before = model.first.tolist()
    assert before == source.first.tolist() and model.second.tolist() == source.second.tolist()
    with pytest.raises(wsync.LayoutMismatch, match="'first' and 'second'"):
        wsync.WeightStrategy().apply_weights(model, Pair(torch.ones(2, 3), torch.zeros(3, 2)))
    assert model.first.tolist() == before


# --- extra state ---


class Counting(nn.Module):
    """One parameter, and any extra state."""

    def __init__(self, state: Any = 0) -> None:
        super().__init__()
        self.weight, self.state = nn.Parameter(torch.zeros(2)), state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def test_extra_state_that_cannot_be_pickled_is_named() -> None:
    source, model = (nn.Sequential(Counting(1), Counting(2)) for _ in range(2))
    with wsync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_in_process("policy", model, source)
        nn.init.constant_(source[0].weight, 9.0)
        source[1].state = lambda: None
        with pytest.raises(wsync.LayoutMismatch, match=r"pickled.*'1\._extra_state'"):
            scheme.send()
        assert model[0].weight[0] == 0 and model[1].state == 2
        source[1].state = 3
        scheme.send()
        assert model[0].weight[0] == 9 and model[1].state == 3


# --- sharded weights ---


def sharded_policy() -> Policy:
    model = Policy()
    sharded(model)
    return model


def forms_of(model: nn.Module) -> list[Any]:
    return [model, model.state_dict(), TensorDict.from_module(model), {0: model}]


@pytest.mark.parametrize("form", range(4))
def test_sharded_weights_are_refused_in_every_form_with_the_call_that_gathers_them(form: int) -> None:
    whole, model = Policy(), Policy()
    with wsync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_in_process("policy", model)
        for _ in range(2):
            with pytest.raises(wsync.LayoutMismatch, match=r"DTensor.*get_model_state_dict"):
                scheme.send(forms_of(sharded_policy())[form])
            scheme.send(forms_of(whole)[form])
        assert torch.equal(model.layer.weight, whole.layer.weight)
        other = sharded_policy()
        scheme.send(get_model_state_dict(other, options=StateDictOptions(full_state_dict=True, cpu_offload=True)))
        assert torch.equal(model.layer.weight, other.layer.weight.full_tensor())  # type: ignore
