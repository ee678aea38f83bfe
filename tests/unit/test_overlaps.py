"""Tensors that lie partly in one memory are refused; tied ones, and those that lie interleaved, are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wsync import LayoutMismatch, MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, WeightStrategy


class Pair(nn.Module):
    """Two parameters.

    Args:
        first, second: their values; the parameters have the memory of these tensors.
    """

    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)


def partly() -> Pair:
    memory = torch.zeros(6)
    return Pair(memory[:4], memory[2:])


def inside() -> Pair:
    memory = torch.zeros(4, 4)
    return Pair(memory, memory[1])


def crossing() -> Pair:
    memory = torch.zeros(4, 4)
    return Pair(memory[1], memory[:, 2])


def of_other_dtypes() -> Pair:
    memory = torch.zeros(4)
    return Pair(memory, memory[2:].view(torch.float16))


def apart(source: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in source.state_dict().items()}


@pytest.mark.parametrize("make", [partly, inside, crossing, of_other_dtypes])
@pytest.mark.parametrize("kind", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_partly_overlapping_tensors_are_refused_at_either_end(kind: Any, make: Any) -> None:
    problem = "'(first' and 'second|second' and 'first)'.*overlap"
    for source, model in ((make(), make()), (apart(make()), make())):
        with pytest.raises(LayoutMismatch, match=problem), kind(timeout=5.0) as scheme:
            scheme.init_in_process("policy", model, source)
    with pytest.raises(LayoutMismatch, match=problem):
        WeightStrategy().apply_weights(make(), apart(make()))
    weights = apart(make())
    model = Pair(*apart(make()).values())
    with kind(timeout=5.0) as scheme:
        scheme.init_in_process("policy", model)
        with pytest.raises(LayoutMismatch, match=problem):
            scheme.send(make())
        scheme.send({name: tensor + 3 for name, tensor in weights.items()})
        assert model.first.eq(3).all() and model.second.eq(3).all()


def interleaved() -> Pair:
    memory = torch.zeros(3, 4)
    return Pair(memory[:, ::2], memory[:, 1::2])


def neighbours() -> Pair:
    memory = torch.zeros(6)
    return Pair(memory[:3], memory[3:])


@pytest.mark.parametrize("make", [interleaved, neighbours])
def test_tensors_of_one_storage_that_share_no_value_are_carried(make: Any) -> None:
    source, model = make(), make()
    with MultiProcessWeightSyncScheme(timeout=5.0) as scheme:
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
    WeightStrategy().apply_weights(model, source)
    assert model.first.tolist() == source.first.tolist() and model.second.tolist() == source.second.tolist()
    before = model.first.tolist()
    with pytest.raises(LayoutMismatch, match="'first' and 'second'"):
        WeightStrategy().apply_weights(model, Pair(torch.ones(2, 3), torch.zeros(3, 2)))
    assert model.first.tolist() == before
