"""Transforms of weights: their values, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wsync
from wsync.testing.models import fill
from wsync.transforms import Cast, Chain, Dequantize, Exclude, Fuse, Quantize, QuantizeInt8, Rename, Select


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * scale


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("scale", [1.0, 9e-4, 2e-6])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_quantised_values_are_off_by_half_their_scale_at_most(
    dtype: torch.dtype, scale: float, per_channel: bool
) -> None:
    weight = random(128, 64, scale=scale).to(dtype)
    sent = QuantizeInt8(per_channel=per_channel)({"weight": weight})
    got = Dequantize()(sent)["weight"]
    assert ((got - weight.float()).abs() <= 0.5001 * sent["weight_scale"]).all()


@pytest.mark.parametrize("quantize", [QuantizeInt8(), Quantize("float8_e4m3fn")])
def test_a_cast_leaves_quantised_weights_and_their_scales_alone(quantize: Quantize) -> None:
    given = {**quantize({"x": random(4, 4)}), "y_scale": random(4), "z": random(4)}
    got = Cast("bfloat16")(given)
    assert got["x"] is given["x"] and got["x_scale"] is given["x_scale"]
    assert got["y_scale"].dtype is got["z"].dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("transform", "names", "said"),
    [
        (QuantizeInt8(only="x"), ["x", "x_scale"], "'x_scale'"),
        (Fuse({"z": ["x", "y"]}), ["x", "y", "z"], "'z'"),
        (Rename({"x": "y"}), ["x", "y"], "'y'"),
        (Fuse({"*.z": ["*.x"], "a.*": ["a.*"]}), ["a.x", "a.z"], "the same name: 'a.z'"),
    ],
)
def test_no_weight_is_overwritten(transform: Any, names: list[str], said: str) -> None:
    with pytest.raises(wsync.LayoutMismatch, match=said):
        transform({name: random(4, 4) for name in names})


class ActorCritic(nn.Module):
    """Two layers that an actor has, too, and the critic's."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.pi, self.v = (nn.Linear(2, 2) for _ in range(3))


class Actor(ActorCritic):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        del self.v
        self.to(dtype)


@pytest.mark.parametrize(
    "transform",
    [
        Select("bodi", "pi"),
        Exclude("v", "bodi"),
        Cast("bfloat16", only=["pi", "bodi"]),
        QuantizeInt8(only="bodi"),
        Rename({"bodi": "other"}),
        Fuse({"x": ["bodi"]}),
    ],
)
@pytest.mark.parametrize("side", ["send_transform", "receive_transform"])
def test_a_pattern_or_name_that_no_weight_has_is_an_error(side: str, transform: Any) -> None:
    options: dict[str, Any] = {side: transform}
    said = rf"{side} {type(transform).__name__}.*no .*'bodi'; there are .*'pi\.weight'"
    with (
        pytest.raises(wsync.LayoutMismatch, match=said),
        wsync.SharedMemWeightSyncScheme(timeout=10.0, **options) as scheme,
    ):
        scheme.init_in_process("policy", ActorCritic(), ActorCritic())


@pytest.mark.parametrize(
    "transforms",
    [
        [Exclude("v"), Cast("bfloat16", only=["body", "pi"])],
        [Select(["body", "pi"]), Cast("bfloat16")],
        [Exclude("v"), Fuse({"pi.weight": ["pi.weight"]}), Cast("bfloat16")],
        Chain([Exclude("v"), Chain([Cast("bfloat16", only=["body", "pi"])], "inner")], "send_transform"),
    ],
)
def test_a_partial_update_need_not_have_weights_for_every_pattern(transforms: Any) -> None:
    source, model = fill(ActorCritic(), 1), Actor(torch.bfloat16)
    with wsync.SharedMemWeightSyncScheme(timeout=10.0, send_transform=transforms) as scheme:
        scheme.init_in_process("policy", model, source)
        scheme.send({"body.weight": torch.full((2, 2), 5.0)}, partial=True)
        assert model.body.weight.unique().tolist() == [5]
        assert {number for one in (model.body.bias, *model.pi.parameters()) for number in one.flatten().tolist()} == {1}
        with pytest.raises(wsync.LayoutMismatch, match=r"send_transform (Exclude|Select)"):
            scheme.send({"v.weight": torch.zeros(2, 2)}, partial=True)
