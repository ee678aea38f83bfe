"""Differences between two packed versions: exact, smaller, and refused where they are damaged."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import wsync
from wsync.checksum import CHECKSUM, checksum_of
from wsync.receiving.blocking_reader import BlockingReader
from wsync.receiving.events import Published
from wsync.transforms import Cast, Chain, Delta, compose
from wsync.transforms.chain import delta_of
from wsync.transforms.delta import apply_difference, base_of
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer
from wsync.weights.snapshot import Snapshot

pytest.importorskip("zstandard", reason="the extra [delta] is not installed")


def packed(weights: dict[str, Tensor]) -> tuple[Layout, Tensor]:
    layout = Layout.of(Snapshot(weights))
    buffer = Buffer.new(layout)
    buffer.pack(layout.order(Snapshot(weights)))
    return layout, buffer.flat


def versions(dtype: torch.dtype, lr: float) -> tuple[Layout, Tensor, Tensor]:
    """Two versions of ``dtype``, the second one after a step of ``lr`` for each weight."""
    torch.manual_seed(0)
    old = {"a": 0.02 * torch.randn(300, 100), "b": torch.randn(7), "count": torch.arange(5)}
    new = {name: w + lr * torch.randn_like(w) if w.is_floating_point() else w + 1 for name, w in old.items()}
    cast = Cast(dtype)
    layout, base = packed({name: tensor.clone() for name, tensor in cast(old).items()})
    return layout, base, packed(dict(cast(new)))[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("lr", [0.0, 1e-6, 1e-3])
def test_the_result_is_exact(dtype: torch.dtype, lr: float) -> None:
    layout, base, new = versions(dtype, lr)
    difference = Delta(level=1).difference(base, 41, new, layout.width)
    assert difference is not None and base_of(difference) == 41
    result = torch.full_like(new, 77)
    apply_difference(difference, base, result)
    assert torch.equal(result, new)


def test_few_changes_are_few_bytes() -> None:
    layout, base, new = versions(torch.bfloat16, 1e-6)
    difference = Delta().difference(base, 1, new, layout.width)
    assert difference is not None and len(difference) < 0.15 * layout.nbytes


def test_where_everything_has_changed_there_is_none() -> None:
    layout, base = packed({"w": torch.randn(10_000)})
    _, new = packed({"w": -3 * torch.randn(10_000)})
    assert Delta().difference(base, 1, new, layout.width) is None


def test_damage_is_refused() -> None:
    layout, base, new = versions(torch.bfloat16, 1e-4)
    difference = Delta().difference(base, 1, new, layout.width)
    assert difference is not None
    for wrong in (b"", difference[:5], difference[:30], difference[:8] + b"\x03" + difference[9:]):
        with pytest.raises(ValueError, match=r"difference|number"):
            apply_difference(wrong, base, torch.zeros_like(base))
    with pytest.raises(ValueError, match="is not one of"):
        apply_difference(difference, base[:-64], torch.zeros_like(base[:-64]))


class Given:
    """A transport that returns the weights that it was given."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights

    def receive_weights(self, timeout: float | None = None, **_: Any) -> dict[str, Tensor]:
        return self.weights


def test_a_damaged_difference_leaves_nothing_between_the_tensors() -> None:
    """The buffer is used again, by a transport that writes only the tensors."""
    weights = {"a": torch.ones(8), "b": torch.ones(2)}
    layout, flat = packed(weights)
    transport: Any = Given(weights)
    reader = BlockingReader(transport, wsync.WeightStrategy("state_dict"), binds=True, timeout=1.0)
    reader.set_layout(layout, None, delta=True)
    payload = CHECKSUM.pack(checksum_of(flat, b""))
    damaged = Delta().difference(flat, 1, torch.full_like(flat, 7), layout.width)
    assert damaged is not None
    for version, damage in ((1, False), (2, True), (3, False)):
        if damage:
            reader.on_difference(version, damaged)
        else:
            reader.on_begin_receive(version, payload)
        assert reader.on_update(version, payload) == Published()
        update = reader.poll_update()
        assert update is not None and bool(update.damage) == damage
        reader.on_installed(update, update.damage)
    reader.close()


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
    with pytest.raises(ImportError, match="pip install zstandard"):
        Delta()


def test_in_shared_memory_nothing_travels() -> None:
    model, copy = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    scheme = wsync.SharedMemWeightSyncScheme(send_transform=Delta())
    scheme.init_in_process("policy", copy, source=model)
    scheme.send()
    assert torch.equal(copy.weight, model.weight)
    scheme.shutdown()
