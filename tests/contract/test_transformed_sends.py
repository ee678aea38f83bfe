"""Sends through transforms: while the model changes under them, in parts, as differences, in int8."""

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from backends import BuiltIn
from small_models import Wide, make_engine, make_trained
from torch import nn

import wsync
from wsync.testing import commands
from wsync.testing.commands import WorkerState
from wsync.testing.models import WithExtraState, digest, nudge
from wsync.transforms import Cast, Delta, Dequantize, Exclude, Fuse, QuantizeInt8, Rename

TO_ENGINE = (
    Fuse({f"qkv.{name}": [f"{part}.{name}" for part in "qkv"] for name in ("weight", "bias")}),
    Exclude("head.*"),
    Rename({"embed.weight": "tokens.weight"}),
    Cast("bfloat16"),
)


def join_engine(state: WorkerState, scheme: wsync.WeightSyncScheme, loads: bool) -> None:
    """Connect a model, or an engine that keeps copies of what it is given by ``load``."""
    engine: Any = {} if loads else make_engine()

    def load(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        engine.update((name, tensor.clone()) for name, tensor in pairs)

    receiver: dict[str, Any] = {"load": load} if loads else {"model": engine}
    scheme.init_on_receiver("policy", worker_idx=0, **receiver)
    state.schemes["policy"], state.models["policy"] = scheme, engine
    scheme.connect()


@pytest.mark.parametrize(
    ("end", "loads"), [("send_transform", False), ("receive_transform", False), ("send_transform", True)]
)
def test_a_model_of_other_names_shapes_and_precision(backend: BuiltIn, end: str, loads: bool) -> None:
    """Transformed at either end, an engine (or what it loads) has the values of a reference, version by version."""
    with backend.workers(1) as workers, backend.make_scheme(timeout=30.0, **{end: TO_ENGINE}) as scheme:
        model, reference = make_trained(), make_engine()
        scheme.init_on_sender("policy", model=model, num_workers=1)
        workers[0].start(join_engine, scheme, loads)
        scheme.connect()
        workers.results()
        for _ in range(3):
            nudge(model)
            fused = {
                f"qkv.{name}": torch.cat([model[part].get_parameter(name) for part in "qkv"])
                for name in ("weight", "bias")
            }
            reference.load_state_dict({"tokens.weight": model.embed.weight, **fused})
            report = scheme.send()
            assert workers.call(commands.digest) == [digest(reference)]
            assert end == "receive_transform" or (report is not None and report.bytes < 0.6 * bytes_of(model))


def weights_of(state: WorkerState) -> list[torch.Tensor]:
    with wsync.gate():
        return [parameter.detach().clone() for parameter in state.models["policy"].parameters()]


def bytes_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def test_quantised_weights_are_off_by_half_a_step_at_most(backend: BuiltIn) -> None:
    transforms = {"send_transform": QuantizeInt8(), "receive_transform": Dequantize()}
    with backend.connected(1, Wide, **transforms) as session:
        nudge(session.model)
        report = session.scheme.send()
        weight, bias = session.workers[0].call(weights_of)
        expected = session.model.weight.detach()
        assert ((weight - expected).abs() <= 0.5001 * expected.abs().amax(1, keepdim=True) / 127).all()
        assert torch.equal(bias, session.model.bias.detach())
        assert report is not None and report.bytes < 0.3 * bytes_of(session.model)


def test_a_partial_update(backend: BuiltIn) -> None:
    """The rest keeps the values that were sent last, not the trainer's newest; it is one version."""
    with backend.connected(make=make_trained) as session:
        scheme, model, reference = session.scheme, session.model, make_trained()
        reference.load_state_dict(model.state_dict())
        for _ in range(3):
            nudge(model)
            reference.k.load_state_dict(model.k.state_dict())
            version = scheme.version
            scheme.send({f"k.{name}": tensor for name, tensor in model.k.state_dict().items()}, partial=True)
            assert session.versions() == [version + 1] * 2
            assert session.digests() == [digest(reference)] * 2
        scheme.send()
        assert session.digests() == [digest(model)] * 2


def test_differences_are_exact_and_a_missed_base_gets_the_full_weights(backend: BuiltIn) -> None:
    pytest.importorskip("zstandard", reason="the extra [delta] is not installed")
    with backend.connected(make=Wide, send_transform=Delta()) as session:
        scheme, model = session.scheme, session.model
        for count in (10, 10, None, 10):  # None: a difference would not be smaller
            nudge(model, count)
            report = scheme.send()
            if backend.name == "distributed":  # shared memory has all of the weights, whatever has changed
                assert report is not None and (report.bytes < 0.1 * bytes_of(model)) == (count is not None)
            assert session.digests() == [digest(model)] * 2
        nudge(model, 10)
        scheme.send(worker_ids=0)
        nudge(model, 10)
        scheme.send()  # worker 1 has another base
        assert session.digests() == [digest(model)] * 2
        nudge(model, 10)
        wsync.synchronize({scheme: model})
        assert session.digests() == [digest(model)] * 2
        other = copy.deepcopy(model)
        nudge(other, 10)
        scheme.send({0: model, 1: other})  # two bases of one version
        assert session.digests() == [digest(model), digest(other)]
        nudge(model, 10)
        scheme.send(model)
        assert session.digests() == [digest(model)] * 2


class Refusing(WithExtraState):
    """Large enough for a difference to be smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16_384))


def test_differences_go_on_after_an_update_that_was_refused(backend: BuiltIn) -> None:
    pytest.importorskip("zstandard", reason="the extra [delta] is not installed")
    with backend.connected(make=Refusing, send_transform=Delta()) as session:
        scheme, model = session.scheme, session.model
        for send in (scheme.send, lambda: wsync.synchronize({scheme: model})):
            nudge(model, 10)
            scheme.send()
            model.state = "refuse"
            with pytest.raises(wsync.WorkerFailed, match="ArithmeticError"):
                send()
            model.state = "accepted"
            for _ in range(2):
                nudge(model, 10)
                scheme.send()
                assert session.digests() == [digest(model)] * 2
