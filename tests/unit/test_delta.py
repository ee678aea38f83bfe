"""Differences between two packed versions: exact, smaller, and refused where they are damaged."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

import wsync
from wsync.transforms import Cast, Chain, Delta, compose
from wsync.transforms.chain import delta_of
from wsync.transforms.delta import apply_difference
from wsync.weights.packing import packed

pytest.importorskip("zstandard", reason="the extra [delta] is not installed")


def bytes_of(weights: dict[str, Tensor]) -> memoryview:
    return packed({name: tensor.clone() for name, tensor in weights.items()})[1].memory


def versions(dtype: torch.dtype, lr: float) -> tuple[int, memoryview, memoryview]:
    """The width of the numbers, and two versions of ``dtype``, a step of ``lr`` apart."""
    torch.manual_seed(0)
    old = {"a": 0.02 * torch.randn(300, 100), "b": torch.randn(7), "count": torch.arange(5)}
    new = {name: w + lr * torch.randn_like(w) if w.is_floating_point() else w + 1 for name, w in old.items()}
    cast = Cast(dtype)
    return dtype.itemsize, bytes_of(cast(old)), bytes_of(cast(new))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("lr", [0.0, 1e-6, 1e-3])
def test_the_result_is_exact(dtype: torch.dtype, lr: float) -> None:
    width, base, new = versions(dtype, lr)
    difference = Delta(level=1).difference(base, new, width)
    assert difference is not None
    result = bytearray(len(new))
    apply_difference(base, difference, result)
    assert result == new
    apply_difference(base, difference, base)
    assert base == new


def test_few_changes_are_few_bytes() -> None:
    width, base, new = versions(torch.bfloat16, 1e-6)
    difference = Delta().difference(base, new, width)
    assert difference is not None and len(difference) < 0.15 * len(new)


def test_where_everything_has_changed_there_is_none() -> None:
    base, new = (bytes_of({"w": factor * torch.randn(10_000)}) for factor in (1, -3))
    assert Delta().difference(base, new, 4) is None


def test_damage_is_refused_and_nothing_is_written() -> None:
    width, base, new = versions(torch.bfloat16, 1e-4)
    difference, result = Delta().difference(base, new, width), bytearray(len(new))
    assert difference is not None
    for wrong in (b"", difference[:5], difference[:30], b"\x03" + difference[1:], difference[:-9] + bytes(9)):
        with pytest.raises(ValueError, match="difference"):
            apply_difference(base, wrong, result)
    with pytest.raises(ValueError, match="is not one of"):
        apply_difference(base[:-64], difference, result)
    assert not any(result)


def test_its_place_is_the_end_of_send_transform() -> None:
    delta = Delta()
    assert delta_of(None) is None and delta_of(Cast("bfloat16")) is None
    assert delta_of(delta) is delta and delta_of([Cast("bfloat16"), delta]) is delta
    assert delta_of([Chain([Cast("bfloat16"), Chain([delta], "inner")], "outer")]) is delta
    for wrong in ([delta, Cast("bfloat16")], [Chain([delta], "inner"), delta], [delta, delta], [Delta(), delta]):
        with pytest.raises(ValueError, match="last"):
            delta_of(wrong)
    with pytest.raises(ValueError, match="belongs in send_transform"):
        compose([delta], "receive_transform")
    with pytest.raises(ValueError, match="levels"):
        Delta(level=100)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match="zstandard is not installed"):
        Delta()


def test_in_shared_memory_nothing_travels() -> None:
    model, copy = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    scheme = wsync.SharedMemWeightSyncScheme(send_transform=Delta())
    scheme.init_in_process("policy", copy, source=model)
    scheme.send()
    assert torch.equal(copy.weight, model.weight)
    scheme.shutdown()
