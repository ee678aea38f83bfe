"""Weights: layouts, buffers, what is refused by name, how a source reads and a model takes them."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictParams
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from wsync.errors import LayoutMismatch
from wsync.weights.binding import Binding, dump_extra, load_extra, unshare
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer, BufferPool, packed
from wsync.weights.snapshot import Snapshot, snapshot
from wsync.weights.source import Source, per_worker
from wsync.weights.strategy import WeightStrategy
from wsync.weights.targets import Destination
from wsync.weights.tensors import in_clean_thread

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


class Net(nn.Module):
    """Layers with and without bias, a buffer that a state dict has, and a parameter under two names."""

    def __init__(self, value: float | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3, bias=False), nn.Tanh())
        self.register_buffer("count", torch.zeros(1))
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.body[1].weight  # type: ignore[union-attr]
        if value is not None:
            for tensor in (*self.parameters(), *self.buffers()):
                nn.init.constant_(tensor, value)

    def values(self) -> set[float]:
        return {one for tensor in (*self.parameters(), *self.buffers()) for one in tensor.flatten().tolist()}


class WithExtra(nn.Linear):
    """A layer with extra state, which it refuses if it is negative."""

    def __init__(self, state: Any = 0) -> None:
        super().__init__(2, 2)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        if state < 0:
            raise OSError("refused")
        self.state = state


def sent_to(model: Any, weights: Any, **options: Any) -> tuple[Any, Buffer]:
    """Install ``weights`` in ``model``; return the target, and the buffer that it may be bound to."""
    given_ = snapshot(weights)
    layout, buffer = packed(weights)
    target = Destination(model).target(layout, **{"bind": True, **options})
    target.install(buffer.views, load_extra(dump_extra(given_.extra)))
    return target, buffer


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


# --- layouts and buffers ---


@settings(max_examples=100, deadline=None)
@given(st.lists(tensors(), min_size=1, max_size=6))
def test_packed_bytes_are_the_weights_and_a_layout_travels_as_plain_data(given_: list[Tensor]) -> None:
    weights = {f"t{i}": tensor for i, tensor in enumerate(given_)}
    layout, buffer = packed(weights)
    for name, view in zip(layout.names, buffer.views, strict=True):
        original = weights[name]
        assert view.shape == original.shape and view.dtype == original.dtype and raw(view) == raw(original)
    assert buffer.memory.nbytes == layout.nbytes
    copy = Layout.decode(layout.encode())
    assert copy == layout


def test_a_damaged_layout_is_refused() -> None:
    layout, _ = packed(Net())
    data = bytearray(layout.encode())
    for damage in (b"", b"\xc0", bytes(data[:-1]), bytes(data) + b"\x00"):
        with pytest.raises(ValueError):
            Layout.decode(damage)
    for change in ({"nbytes": 64}, {"offsets": (0,) * 3}, {"names": ("x",) * len(layout.names)}, {"ties": ((0, 1),)}):
        wrong = Layout(**{**{name: getattr(layout, name) for name in layout.__struct_fields__}, **change})
        with pytest.raises(ValueError, match="malformed"):
            Layout.decode(wrong.encode())


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"a": torch.zeros(2)}, "missing 'b'"),
        ({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)}, "unknown 'c'"),
        ({"a": torch.zeros(2), "b": torch.zeros(4)}, r"'b' is float32\[4\], not float32\[3\]"),
        ({"a": torch.zeros(2).long(), "b": torch.zeros(3)}, r"'a' is int64\[2\], not float32\[2\]"),
        ({"a": torch.zeros(2), "b": torch.zeros(3, device="meta")}, "'b' has no values: .* meta"),
        ({"a": torch.zeros(2), "b": torch.ones(3).to_sparse()}, "'b' is sparse"),
    ],
)
def test_mismatches_are_named(wrong: dict[str, Tensor], problem: str) -> None:
    layout, buffer = packed({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(LayoutMismatch, match=problem):
        layout.order(snapshot(wrong))
    if wrong.keys() == {"a", "b"}:
        with pytest.raises(LayoutMismatch, match=problem):
            buffer.pack([wrong[name] for name in layout.names])


def test_ties_are_stored_once_and_have_to_stay_alike() -> None:
    tensor, square = torch.full((1000,), torch.nan), torch.rand(2, 2)
    layout, _ = packed({"a": tensor, "b": tensor})
    assert layout.nbytes < 2 * 4000 and len(layout.ties) == 1
    layout.order(Snapshot({"a": tensor.clone(), "b": tensor.clone()}))
    with pytest.raises(LayoutMismatch, match="tied"):
        layout.order(Snapshot({"a": tensor, "b": torch.ones(1000)}))
    with pytest.raises(LayoutMismatch, match="tied"):
        packed({"a": square, "b": square})[0].order(Snapshot({"a": square, "b": square.T}))


def test_a_pool_reuses_memory_that_nobody_has() -> None:
    layout, buffer = packed(Net())
    pool = BufferPool()
    with torch.inference_mode():
        first, second = pool.reserve(layout), pool.reserve(layout)
    address = first.flat.data_ptr()
    assert address != second.flat.data_ptr()
    del first
    third = pool.reserve(layout)
    assert third.flat.data_ptr() == address and pool.reserve(layout).flat.data_ptr() != address
    for tensor in (third.flat, *third.views):
        tensor.fill_(1)  # not made in inference mode
    assert buffer.pack(list(buffer.views))


# --- what weights are ---


def test_names_have_no_component_of_a_wrapper_at_any_depth() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inner = nn.Sequential(checkpoint_wrapper(plain[0]), torch.compile(plain[1]))  # type: ignore[arg-type]
    for wrapped in (
        inner,
        torch.compile(inner),
        nn.DataParallel(inner),
        inner.state_dict(),
        TensorDict(inner.state_dict()),
    ):
        assert snapshot(wrapped).tensors.keys() == plain.state_dict().keys()
    sent_to(inner, {name: torch.full_like(one, 3.0) for name, one in plain.state_dict().items()})
    assert {value for one in plain.parameters() for value in one.flatten().tolist()} == {3.0}
    WeightStrategy().apply_weights(state := inner.state_dict(), plain.state_dict(), inplace=False)
    assert state["1._orig_mod.weight"].eq(3).all()


def test_names_and_values_that_are_no_weights() -> None:
    for kind in (dict, TensorDict):
        with pytest.raises(LayoutMismatch, match=r"two weights have one name: 'a\.b'"):
            snapshot(kind({"a": {"b": torch.zeros(2)}, "a.b": torch.ones(2)}))
    with pytest.raises(TypeError, match=r"'a' is a ndarray; .*torch\.from_numpy"):
        snapshot({"a": np.zeros(2)})


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 2))), "'0' is a TorchScript"),
        (lambda: nn.LazyLinear(2), "'weight' has no shape yet"),
    ],
)
def test_modules_that_cannot_be_synchronised_are_refused(make: Any, problem: str) -> None:
    with pytest.raises(LayoutMismatch, match=problem):
        snapshot(make())


def pair(first: Tensor, second: Tensor) -> nn.ParameterDict:
    return nn.ParameterDict({"first": nn.Parameter(first), "second": nn.Parameter(second)})


def test_tensors_that_overlap_partly_are_refused_at_either_end() -> None:
    row, square = torch.zeros(6), torch.zeros(4, 4)
    for one, other in (
        (row[:4], row[2:]),
        (square, square[1]),
        (square[1], square[:, 2]),
        (row, row[2:].view(torch.float16)),
    ):
        apart = {"first": one.clone(), "second": other.clone()}
        for weights, model in ((pair(one, other), pair(*apart.values())), (apart, pair(one, other))):
            with pytest.raises(LayoutMismatch, match=r"'(first' and 'second|second' and 'first)'.*overlap"):
                sent_to(model, weights)
    model = pair(square, square)
    sent_to(model, {"first": torch.arange(16.0).view(4, 4), "second": torch.arange(16.0).view(4, 4)}, bind=False)
    with pytest.raises(LayoutMismatch, match="'first' and 'second' are tied here"):
        sent_to(model, {"first": torch.zeros(4, 4), "second": torch.ones(4, 4)}, bind=False)
    assert model["first"].tolist() == torch.arange(16.0).view(4, 4).tolist()


# --- a model in a worker ---


def test_parameters_are_bound_and_buffers_are_copied_until_they_are_detached() -> None:
    model = Net(0)
    target, buffer = sent_to(model, Net(1))
    assert model.values() == {1}
    buffer.flat.zero_()
    assert set(model.head.weight.flatten().tolist()) == {0} and model.count.item() == 1
    target.detach()
    buffer.flat.fill_(7)
    assert set(model.head.weight.flatten().tolist()) == {0}
    target.install(packed(Net(2))[1].views)
    model.body[0].weight = nn.Parameter(torch.zeros(2, 2))  # type: ignore[union-attr]
    with pytest.raises(LayoutMismatch, match=r"'body.0.weight' is float32\[2, 2\]"):
        target.install(packed(Net(3))[1].views)
    assert model.count.item() == 2


def test_what_somebody_else_has_is_copied_into() -> None:
    model = Net(0)
    kept, array = model.body[0].weight.detach(), model.head.weight.detach().numpy()
    sent_to(model, Net(1))
    assert kept.eq(1).all() and (array == 1).all()
    embedding = nn.Embedding(3, 2, max_norm=1.0)
    _, buffer = sent_to(embedding, {"weight": torch.full((3, 2), 5.0)})
    embedding(torch.tensor([0, 1, 2]))  # writes its parameter
    assert buffer.views[0].eq(5).all()


def test_a_model_made_in_inference_mode_takes_weights_and_can_be_called() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for value in (1.0, 2.0):
        sent_to(model, {name: torch.full_like(one, value) for name, one in model.state_dict().items()})
        assert model[0].weight.eq(value).all()
        with torch.no_grad():
            model.eval()(torch.ones(1, 2))


def test_a_buffer_that_cannot_be_written_gets_memory_of_its_own_and_in_a_mapping_is_refused() -> None:
    negative = torch.zeros(2, 4, dtype=torch.complex64).conj().imag
    for odd in (torch.zeros(1).expand(2, 4), negative, torch.zeros(8).as_strided((2, 4), (2, 1))):
        values = torch.arange(8.0).view(2, 4)
        for write in (sent_to, WeightStrategy().apply_weights):
            with pytest.raises(LayoutMismatch, match=r"'mask' .*: clone it"):
                write({"mask": odd}, {"mask": values})
        model = nn.Module()
        model.register_buffer("mask", odd)
        sent_to(model, {"mask": values})
        assert torch.equal(model.get_buffer("mask"), values)


def test_extra_state_is_set_or_nothing_is() -> None:
    model, source = nn.ModuleList([WithExtra(), WithExtra()]), nn.ModuleList([WithExtra(1), WithExtra(2)])
    target, _ = sent_to(model, source)
    assert [one.state for one in model] == [1, 2] and target.may_refuse
    _, buffer = packed(source)
    for call in (target.check_only, target.install):
        with pytest.raises(OSError, match="refused"):
            call(buffer.views, {"0._extra_state": 5, "1._extra_state": -1})
        assert [one.state for one in model] == [1, 2] and not target.mixed
    target.check_only(buffer.views, {"0._extra_state": 5})
    assert model[0].state == 1
    with pytest.raises(LayoutMismatch, match=r"'1\._extra_state' \("):
        dump_extra({"0._extra_state": 1, "1._extra_state": lambda: None})


def test_a_target_names_what_does_not_fit_and_a_remedy() -> None:
    for dtype, lacks, remedy in (
        (torch.float32, True, r"Exclude\('bias'\)"),
        (torch.float16, False, r"Cast\('float16'\)"),
    ):
        own = nn.Linear(2, 2, bias=not lacks, dtype=dtype)
        for model in (own, own.state_dict()):
            with pytest.raises(LayoutMismatch, match=remedy):
                sent_to(model, nn.Linear(2, 2))
    with pytest.raises(LayoutMismatch, match=r"Rename\(\{'weight': 'layer\.weight'\}\)"):
        sent_to(nn.ModuleDict({"layer": nn.Linear(2, 2)}), nn.Linear(2, 2))
    with pytest.raises(LayoutMismatch, match=r"lazily stacked"):
        sent_to(LazyStackedTensorDict(TensorDict({"a": torch.zeros(1)})), {"a": torch.zeros(1, 1)})


# --- a trainer's source ---

FORMS: dict[str, Any] = {
    "the module": lambda net: net,
    "a state dict": lambda net: net.state_dict(),
    "a dict": lambda net: dict(net.state_dict()),
    "a nested dict": lambda net: {
        "count": net.count,
        "body": {str(i): dict(net.body[i].state_dict()) for i in range(2)},
        "head": dict(net.head.state_dict()),
    },
    "a TensorDict": lambda net: TensorDict.from_module(net).data,
    "a flat TensorDict": lambda net: TensorDict(dict(net.state_dict())),
    "parameters": lambda net: TensorDictParams(TensorDict.from_module(net), no_convert=True),
}


def test_a_form_that_was_sent_is_found_at_once() -> None:
    own, source = Net(1), Source(model := Net(1))
    layout = Layout.of(source.first())
    for make in FORMS.values():
        assert source.usual(make(own), layout) is None
        [part] = source.parts(make(own), [0, 1], layout)
        assert part.workers == [0, 1] and len(part.tensors) == 5
        source.learn(make(own), layout)
    buffer = Buffer.new(layout)
    for name, make in FORMS.items():
        for net in (own, Net(3)) if name != "the module" else (own,):
            assert buffer.pack(source.usual(make(net), layout))
            assert {value for view in buffer.views for value in view.flatten().tolist()} == net.values()
    assert source.usual(None, layout) is None  # ``model`` was not sent yet
    source.learn(None, layout)
    assert buffer.pack(source.usual(None, layout))
    model.extra = nn.Linear(1, 1)
    found = source.usual(None, layout)
    assert found is None or not buffer.pack(found)
    state = own.state_dict()
    for other in ({**state, "more": torch.ones(1)}, OrderedDict(reversed(state.items())), {}):
        assert source.usual(other, layout) is None


def test_a_source_keeps_no_module_alive() -> None:
    net, source = Net(), Source()
    layout = Layout.of(source.first(net))
    source.learn(net, layout)
    gone = weakref.ref(net.body[0])  # type: ignore[arg-type]
    del net
    gc.collect()
    assert gone() is None


def test_weights_per_worker_and_parts_of_a_model() -> None:
    one, two = Net(1), Net(2)
    assert per_worker({np.int64(0): one, 1: two}) == {0: one, 1: two} and per_worker(one.state_dict()) is None
    source = Source({0: one, 1: two})
    layout = Layout.of(source.first())
    parts = list(source.parts(None, [0, 1], layout))
    assert [part.workers for part in parts] == [[0], [1]] and parts[1].tensors[0].flatten()[0] == 2
    with pytest.raises(ValueError, match=r"worker\(s\) \[1\] differ"):
        source.parts({0: one}, [0, 1], layout)
    mapped = Source(one, WeightStrategy("state_dict"), device_map_fn=lambda i, td: {k: v + i for k, v in td.items()})
    assert [part.tensors[0].flatten()[0].item() for part in mapped.parts(None, [0, 1], layout)] == [1, 2]
    rest = packed(one)[1].views
    [part] = Source(one).parts({"head.weight": torch.full((3, 3), 9.0)}, [0], layout, rest)
    assert {name: tensor.flatten()[0].item() for name, tensor in zip(layout.names, part.tensors, strict=True)} == {
        "body.0.bias": 1, "body.0.weight": 1, "body.1.weight": 9, "count": 1, "head.weight": 9
    }  # fmt: skip
    with pytest.raises(LayoutMismatch, match="unknown nothing"):
        Source(one).parts({"nothing": torch.ones(1)}, [0], layout, rest)


# --- strategies, and the rest ---


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("taken", ["tensordict", "state_dict"])
@pytest.mark.parametrize("kind", ["tensordict", "state_dict"])
def test_formats_cross(taken: Any, kind: Any, inplace: bool) -> None:
    weights = WeightStrategy(taken).extract_weights(nn.ModuleDict({"one": nn.Linear(2, 2), "two": WithExtra(5)}))
    model = nn.ModuleDict({"one": nn.Linear(2, 2), "two": WithExtra()})
    destination = WeightStrategy(kind).extract_weights(model)
    memory = model["one"].weight.data_ptr()
    WeightStrategy(kind).apply_weights(destination, weights, inplace)
    WeightStrategy(taken).apply_weights(model, destination, inplace)
    assert torch.equal(model["one"].weight, snapshot(weights).tensors["one.weight"])
    assert model["two"].state == 5 and (model["one"].weight.data_ptr() == memory) is inplace
    with pytest.raises(LayoutMismatch, match=r"one\.bias"):
        WeightStrategy().apply_weights(model, {"one.weight": torch.zeros(2, 2)})


def test_a_model_that_is_unshared_in_inference_mode_can_be_trained_afterwards() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).share_memory()
    with torch.inference_mode():
        unshare(model)
    assert not any(tensor.is_shared() for tensor in model.state_dict().values())
    model(torch.arange(6.0).view(3, 2)).sum().backward()
    with pytest.raises(SystemExit):
        in_clean_thread(exit)


def test_installs_while_a_thread_reads_outside_the_gate_do_not_deadlock() -> None:
    import threading

    model = Net(0)
    target = Binding(model, packed(model)[0])
    buffers, done = [packed(Net(value))[1] for value in (1, 2)], threading.Event()

    def read() -> None:
        for _ in range(20_000):
            model.head.weight.sum()
        done.set()

    threading.Thread(target=read, daemon=True).start()
    while not done.is_set():
        for buffer in buffers:
            target.install(buffer.views)
