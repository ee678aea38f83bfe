"""Strategies: either format is applied to anything, whole or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from wsync import LayoutMismatch, SharedMemWeightSyncScheme, SyncTimeout, WeightStrategy, bytes_of
from wsync.testing.models import EveryTensorKind, digest, scramble


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("taken", ["tensordict", "state_dict"])
@pytest.mark.parametrize("given", ["tensordict", "state_dict"])
def test_formats_cross(taken: Any, given: Any, inplace: bool) -> None:
    source, model = scramble(EveryTensorKind(), 1), scramble(EveryTensorKind(), 2)
    memory = model.wide.data_ptr()
    WeightStrategy(given).apply_weights(model, WeightStrategy(taken).extract_weights(source), inplace=inplace)
    assert digest(model) == digest(source)
    assert (model.wide.data_ptr() == memory) is inplace


@pytest.mark.parametrize("destination", ["tensordict", "state_dict"])
def test_non_persistent_buffers_are_left_out_where_the_destination_lacks_them(destination: Any) -> None:
    source, lacking = nn.Linear(2, 2), WeightStrategy(destination).extract_weights(nn.Linear(2, 2).state_dict())
    source.register_buffer("inv_freq", torch.ones(2), persistent=False)
    WeightStrategy().apply_weights(lacking, source)
    assert torch.equal(lacking["weight"], source.weight) and {*lacking.keys()} == {"weight", "bias"}


def test_weights_that_do_not_fit_change_nothing() -> None:
    model = nn.Linear(2, 3)
    before = model.weight.detach().clone()
    with pytest.raises(LayoutMismatch, match="bias"):
        WeightStrategy().apply_weights(model, {"weight": torch.zeros(3, 2)})
    assert torch.equal(model.weight, before)
    with pytest.raises(ValueError, match="json"):
        WeightStrategy("json")  # pyright: ignore[reportArgumentType]


def meta() -> nn.Module:
    return nn.Linear(2, 2, device="meta")


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: torch.jit.script(nn.Linear(2, 2)), "TorchScript"),
        (lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 2))), "'0' is a TorchScript"),
        (meta, "meta"),
    ],
)
def test_modules_that_cannot_be_synchronised_are_refused_at_either_end(make: Any, problem: str) -> None:
    plain = nn.Sequential(nn.Linear(2, 2)) if isinstance(make(), nn.Sequential) else nn.Linear(2, 2)
    for source, model in ((make(), plain), (plain, make())):
        with pytest.raises(LayoutMismatch, match=problem), SharedMemWeightSyncScheme() as scheme:
            scheme.init_in_process("policy", model, source)


class Counting(nn.Module):
    """Saves its weights under other names, and a number beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale, self.calls = nn.Linear(2, 2), nn.Parameter(torch.zeros(2)), 0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination |= {prefix + "gain": self.scale.detach(), prefix + "bias": self.inner.bias, prefix + "calls": 0}


@pytest.mark.parametrize("make", [Counting, lambda: nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.ReLU()))])
def test_modules_with_a_state_dict_of_their_own_are_synchronised_by_their_parameters(make: Any) -> None:
    source, model = make(), make()
    with SharedMemWeightSyncScheme() as scheme:
        scheme.init_in_process("policy", model, source)
        nn.init.constant_(next(source.parameters()), 3.0)
        scheme.send()
        assert next(model.parameters()).unique().tolist() == [3.0]


def test_weights_on_the_meta_device_define_no_layout() -> None:
    source, model = nn.Sequential(meta(), meta()), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with SharedMemWeightSyncScheme(timeout=0.1) as scheme:
        scheme.init_on_sender("policy", model=source)
        with pytest.raises(LayoutMismatch, match="meta"):
            scheme.connect()
        with pytest.raises(SyncTimeout):
            scheme.connect(weights=model)  # no worker connects


def test_a_name_that_is_a_prefix_of_another_is_refused_in_a_tensordict() -> None:
    weights = {"weight": torch.zeros(2), "weight.scale": torch.zeros(1)}
    with pytest.raises(LayoutMismatch, match=r"'weight\.scale'.*state_dict"):
        WeightStrategy("tensordict").extract_weights(weights)
    assert WeightStrategy("state_dict").extract_weights(weights).keys() == weights.keys()


def test_the_bytes_of_weights_are_their_memory() -> None:
    flat = torch.zeros(10, dtype=torch.uint8)
    weights = {"a.x": flat[:8].view(torch.float32), "b": flat[8:]}
    for given in (weights, TensorDict({"a": {"x": weights["a.x"]}, "b": weights["b"]})):
        flat.zero_()
        bytes_of(given)[:] = 1
        assert flat.eq(1).all()
    assert bytes_of({}).size == 0
    with pytest.raises(ValueError, match="not views of one storage"):
        bytes_of(nn.Linear(3, 2))
