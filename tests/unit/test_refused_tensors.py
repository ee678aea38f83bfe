"""Tensors and extra state that cannot be carried: the error names them, at either end, at once or later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from wsync import LayoutMismatch, MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, WorkerFailed


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


CASES = [
    (without_bias, "'layer.bias'"),
    (meta_bias, "'layer.bias' has no .*meta device"),
    (sparse_bias, "'layer.bias' is sparse"),
    (compressed_weight, "'layer.weight' is sparse"),
    (quantised_bias, "'layer.bias' is quantised"),
    (nested_bias, "'layer.bias' is nested"),
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
