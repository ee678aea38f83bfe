"""Layouts: the views of a packed buffer are the weights, and weights that do not fit are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor, distributed, nn

import wsync
from wsync import LayoutMismatch
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer
from wsync.weights.snapshot import Snapshot, snapshot

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw: Any) -> Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    size = max(1, torch.Size(shape).numel()) * dtype.itemsize
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8)
    tensor = data.view(dtype)[: torch.Size(shape).numel()].reshape(shape)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if tensor.dim() and draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(2, *tensor.shape)[0 if draw(st.booleans()) else slice(None)]
    return tensor


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@settings(max_examples=150, deadline=None)
@given(st.lists(tensors(), min_size=1, max_size=6))
def test_round_trip(given_: list[Tensor]) -> None:
    snapshot = Snapshot({f"t{i}": tensor for i, tensor in enumerate(given_)})
    layout = Layout.of(snapshot)
    buffer = Buffer.new(layout)
    buffer.pack(layout.order(snapshot))
    for name, view in zip(layout.names, buffer.views, strict=True):
        original = snapshot.tensors[name]
        assert view.shape == original.shape and view.dtype == original.dtype
        assert raw(view) == raw(original)


def test_mismatches_are_named() -> None:
    layout = Layout.of(Snapshot({"a": torch.zeros(2), "b": torch.zeros(3)}))
    for wrong, problem in [
        ({"a": torch.zeros(2)}, "missing 'b'"),
        ({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)}, "unknown 'c'"),
        ({"a": torch.zeros(2), "b": torch.zeros(4)}, r"'b' is float32\[4\], not float32\[3\]"),
        ({"a": torch.zeros(2).long(), "b": torch.zeros(3)}, r"'a' is int64\[2\], not float32\[2\]"),
    ]:
        with pytest.raises(LayoutMismatch, match=problem):
            layout.order(Snapshot(wrong))
    with pytest.raises(LayoutMismatch, match="empty"):
        Layout.of(Snapshot({}))


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda model: torch.compile(nn.DataParallel(model))])
def test_names_have_no_prefix_of_a_wrapper(wrap: Any) -> None:
    model, copy = nn.Linear(2, 2), nn.Linear(2, 2)
    with wsync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_in_process("policy", copy, wrap(model))
        nn.init.zeros_(model.weight)
        scheme.send()
        assert copy.weight.eq(0).all()
        scheme.send(wrap(nn.Linear(2, 2)))
        assert not copy.weight.eq(0).any()


def test_data_parallel_training_sends_by_the_names_of_the_module() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model, copy = nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), nn.Linear(2, 2)
        with wsync.SharedMemWeightSyncScheme() as scheme:
            scheme.init_in_process("policy", copy, model)
            assert torch.equal(copy.weight, model.module.weight)
    finally:
        distributed.destroy_process_group()


def test_ties_are_stored_once() -> None:
    tensor = torch.rand(1000)
    layout = Layout.of(Snapshot({"a": tensor, "b": tensor}))
    assert layout.nbytes < 2 * 4000 and len(layout.ties) == 1
    with pytest.raises(LayoutMismatch, match="tied"):
        layout.order(Snapshot({"a": tensor, "b": tensor + 1}))


def test_what_has_one_memory_and_other_values_is_not_tied() -> None:
    imaginary, square = torch.complex(torch.ones(3), torch.arange(3.0)), torch.rand(2, 2)
    conjugated = {"a": imaginary, "b": imaginary.conj()}
    for weights in (Snapshot(conjugated), Snapshot({name: one.imag for name, one in conjugated.items()})):
        layout = Layout.of(weights)
        buffer = Buffer.new(layout)
        buffer.pack(layout.order(weights))
        for name, view in zip(layout.names, buffer.views, strict=True):
            assert torch.equal(view, weights.tensors[name])
    tied = Layout.of(Snapshot({"a": square, "b": square}))
    with pytest.raises(LayoutMismatch, match="tied"):
        tied.order(Snapshot({"a": square, "b": square.T}))


@pytest.mark.parametrize("kind", [dict, TensorDict])
def test_two_weights_with_one_name_are_refused(kind: Any) -> None:
    with pytest.raises(LayoutMismatch, match=r"two weights have one name: 'a\.b'"):
        snapshot(kind({"a": {"b": torch.zeros(2)}, "a.b": torch.ones(2)}))


def test_tied_tensors_may_hold_nans() -> None:
    tensor = torch.full((4,), torch.nan)
    layout = Layout.of(Snapshot({"a": tensor, "b": tensor}))
    layout.order(Snapshot({"a": tensor.clone(), "b": tensor.clone()}))


def test_small_weights_are_copied_from_where_they_lie_now() -> None:
    model = torch.nn.Linear(3, 3)
    state: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
    layout = Layout.of(Snapshot(state))
    flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
    buffer = Buffer.over(layout, flat)

    def packed(weight: Tensor) -> bytes:
        given_ = {**state, "weight": weight}
        buffer.pack([given_[name] for name in layout.names])
        return raw(buffer.views[layout.names.index("weight")])

    weight = state["weight"]
    assert packed(weight) == raw(weight)
    weight.data = torch.rand(3, 3)  # the same parameter, elsewhere
    assert packed(weight) == raw(weight)
    weight.data.t_()  # the same place, another order
    assert packed(weight) == raw(weight)
    negative = torch.complex(torch.rand(3, 3), torch.rand(3, 3)).conj().imag
    assert negative.is_neg() and packed(negative) == raw(negative.resolve_neg())
    assert packed(torch.nn.Buffer(torch.ones(3, 3))) == raw(torch.ones(3, 3))


def test_a_buffer_that_is_made_in_inference_mode_can_be_written_outside_it() -> None:
    layout = Layout.of(Snapshot({"x": torch.zeros(3), "bytes": torch.zeros(3, dtype=torch.uint8)}))
    with torch.inference_mode():
        buffer = Buffer.new(layout)
    for tensor in (buffer.flat, *buffer.views):
        tensor.fill_(1)
