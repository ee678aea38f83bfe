"""Weights: which are taken, by which names, how they are applied, and what is refused by name."""

import math
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict
from torch import Tensor, nn
from workers_here import both_ends, in_process

import wsync
from wsync import LayoutMismatch, SharedMemWeightSyncScheme, SyncTimeout, WeightStrategy, bytes_of
from wsync.testing.models import EveryTensorKind, digest, fill, scramble
from wsync.transforms import Cast, Chain, Dequantize, Exclude, Fuse, Quantize, QuantizeInt8, Rename, Select

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int16, torch.uint8, torch.bool]


def install(model: Any, weights: Any, *later: Any) -> None:
    """Install weights in a model of this process; ``later`` ones are sent by the same scheme."""
    with in_process(model, weights) as scheme:
        for one in later:
            scheme.send(one)


# --- strategies ---


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
def test_modules_that_cannot_be_synchronised_are_refused(make: Any, problem: str) -> None:
    plain = nn.Sequential(nn.Linear(2, 2)) if isinstance(make(), nn.Sequential) else nn.Linear(2, 2)
    for source, model in ((make(), plain), (plain, make())):
        with pytest.raises(LayoutMismatch, match=problem):
            install(model, source)


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
    with in_process(model, source) as scheme:
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
    for form in (weights, TensorDict({"a": {"x": weights["a.x"]}, "b": weights["b"]})):
        flat.zero_()
        bytes_of(form)[:] = 1
        assert flat.eq(1).all()
    assert bytes_of({}).size == 0
    with pytest.raises(ValueError, match="not views of one storage"):
        bytes_of(nn.Linear(3, 2))


# --- any tensors, any wrappers ---


class Tensors(nn.Module):
    """Buffers of these names."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


@st.composite
def tensors(draw: Any) -> Tensor:
    """Any bits, dense or not, expanded, or empty."""
    shape, dtype = draw(st.lists(st.integers(0, 4), max_size=4)), draw(st.sampled_from(DTYPES))
    nbytes = math.prod(shape) * dtype.itemsize
    content = draw(st.binary(min_size=nbytes, max_size=nbytes))
    if dtype is torch.bool:
        content = bytes(byte & 1 for byte in content)
    flat = torch.frombuffer(bytearray(content), dtype=dtype) if nbytes else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape).permute(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        tensor = tensor[..., ::2]
    return tensor.unsqueeze(0).expand(3, *tensor.shape) if draw(st.booleans()) else tensor


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    dense = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return tensor.dtype, tensor.shape, dense.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("kind", [wsync.SharedMemWeightSyncScheme, wsync.MultiProcessWeightSyncScheme])
def test_any_tensors_arrive(kind: Any) -> None:
    @settings(deadline=None, max_examples=40)
    @given(st.lists(tensors(), min_size=1, max_size=5), st.booleans())
    def arrive(values: list[Tensor], tied: bool) -> None:
        named = {f"t{index}": value for index, value in enumerate(values)}
        if tied:
            named["tied"] = values[0]
        source, model = Tensors(named), Tensors({name: torch.zeros_like(value) for name, value in named.items()})
        if tied:
            model.tied = model.t0
        with both_ends(source, kind=kind, model=model):
            assert all(bits(model.get_buffer(name)) == bits(value) for name, value in named.items())

    arrive()


# --- what does not fit ---


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"a": torch.zeros(2)}, "missing 'b'"),
        ({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)}, "unknown 'c'"),
        ({"a": torch.zeros(2), "b": torch.zeros(4)}, r"'b' is float32\[4\], not float32\[3\]"),
        ({"a": torch.zeros(2).long(), "b": torch.zeros(3)}, r"'a' is int64\[2\], not float32\[2\]"),
        ({"a": torch.zeros(2), "b": torch.zeros(3, device="meta")}, "'b' has no values: .* meta"),
        ({"a": torch.zeros(2), "b": torch.ones(3).to_sparse()}, "'b' is sparse"),
        ({"a": {"b": torch.zeros(2)}, "a.b": torch.ones(2)}, r"two weights have one name: 'a\.b'"),
    ],
)
def test_weights_that_do_not_fit_are_named(wrong: dict[str, Any], problem: str) -> None:
    model = {"a": torch.zeros(2), "b": torch.zeros(3)}
    with pytest.raises(LayoutMismatch, match=problem):
        install(model, {"a": torch.ones(2), "b": torch.ones(3)}, wrong)
    assert model["a"].eq(1).all() and model["b"].eq(1).all()


def test_a_worker_names_what_does_not_fit_and_a_remedy() -> None:
    for dtype, lacks, remedy in (
        (torch.float32, True, r"Exclude\('bias'\)"),
        (torch.float16, False, r"Cast\('float16'\)"),
    ):
        own = nn.Linear(2, 2, bias=not lacks, dtype=dtype)
        for model in (own, own.state_dict()):
            with pytest.raises(LayoutMismatch, match=remedy):
                install(model, nn.Linear(2, 2))
    with pytest.raises(LayoutMismatch, match=r"Rename\(\{'weight': 'layer\.weight'\}\)"):
        install(nn.ModuleDict({"layer": nn.Linear(2, 2)}), nn.Linear(2, 2))
    with pytest.raises(LayoutMismatch, match="lazily stacked"):
        install(LazyStackedTensorDict(TensorDict({"a": torch.zeros(1)})), {"a": torch.zeros(1, 1)})


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
                install(model, weights)
    tied = pair(square, square)
    install(tied, {"first": torch.arange(16.0).view(4, 4), "second": torch.arange(16.0).view(4, 4)})
    with pytest.raises(wsync.WorkerFailed, match="'first' and 'second' are tied here"):
        install(tied, {"first": torch.zeros(4, 4), "second": torch.ones(4, 4)})
    assert tied["first"].tolist() == torch.arange(16.0).view(4, 4).tolist()


def test_a_tensor_that_cannot_be_written_is_refused() -> None:
    negative = torch.zeros(2, 4, dtype=torch.complex64).conj().imag
    for odd in (torch.zeros(1).expand(2, 4), negative, torch.zeros(8).as_strided((2, 4), (2, 1))):
        values = torch.arange(8.0).view(2, 4)
        for write in (install, WeightStrategy().apply_weights):
            for destination in ({"mask": odd}, Tensors({"mask": odd})):
                with pytest.raises(LayoutMismatch, match=r"'mask' .*: clone it"):
                    write(destination, {"mask": values})


def test_installs_while_a_thread_reads_outside_the_gate_do_not_deadlock() -> None:
    model, done = nn.Linear(3, 3), threading.Event()

    def read() -> None:
        for _ in range(20_000):
            model.weight.sum()
        done.set()

    with in_process(model) as scheme:
        threading.Thread(target=read, daemon=True).start()
        while not done.is_set():
            for value in (1, 2):
                scheme.send(fill(nn.Linear(3, 3), value))


# --- transforms of weights: their values, and what they refuse ---


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
    with pytest.raises(LayoutMismatch, match=said), in_process(ActorCritic(), ActorCritic(), **options):
        pass


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
    with in_process(model, source, send_transform=transforms) as scheme:
        scheme.send({"body.weight": torch.full((2, 2), 5.0)}, partial=True)
        assert model.body.weight.unique().tolist() == [5]
        assert {number for one in (model.body.bias, *model.pi.parameters()) for number in one.flatten().tolist()} == {1}
        with pytest.raises(wsync.LayoutMismatch, match=r"send_transform (Exclude|Select)"):
            scheme.send({"v.weight": torch.zeros(2, 2)}, partial=True)
