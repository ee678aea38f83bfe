"""The contract, part 7: ends that differ in names, shapes, precision or library."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

import wsync
import wsync.testing.commands as commands
from wsync.testing.commands import WorkerState
from wsync.testing.hooks import TIMEOUT, BackendHooks
from wsync.testing.models import digest
from wsync.testing.session import Session, connect_all
from wsync.testing.workers import Worker, WorkerError
from wsync.transforms import Cast, Delta, Dequantize, Fuse, QuantizeInt8, Rename, Select

WIDTH = 16


class Trained(nn.Module):
    """The trainer's model: three projections, and a head with its weight tied to that of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 8, bias=False)
        self.head.weight = self.embed.weight


class Engine(nn.Module):
    """The worker's model: one fused projection, other names, bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, WIDTH, dtype=torch.bfloat16)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.bfloat16)


TO_ENGINE = (
    Fuse({"qkv.weight": ["q.weight", "k.weight", "v.weight"], "qkv.bias": ["q.bias", "k.bias", "v.bias"]}),
    Select("qkv.*", "embed.weight"),
    Rename({"embed.weight": "tokens.weight"}),
    Cast(torch.bfloat16),
)


def in_engine(model: Trained) -> dict[str, Tensor]:
    """Return the weights that the engine has to have."""
    weight = torch.cat([model.q.weight, model.k.weight, model.v.weight]).detach()
    bias = torch.cat([model.q.bias, model.k.bias, model.v.bias]).detach()
    found = {"tokens.weight": model.embed.weight.detach(), "qkv.weight": weight, "qkv.bias": bias}
    return {name: tensor.bfloat16() for name, tensor in found.items()}


class Wide(nn.Linear):
    """A model that is large enough for a difference to be smaller."""

    def __init__(self) -> None:
        super().__init__(256, 64)


def nudge(model: nn.Module) -> None:
    """Change a few weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[:10] += 1


def perturb(model: nn.Module) -> None:
    """Change every parameter."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()


# --- commands ---


def join_with_load(state: WorkerState, scheme: wsync.WeightSyncScheme) -> None:
    """Connect a receiver without a model, with a function that keeps copies of what it is given."""
    loaded = dict[str, Tensor]()
    state.schemes["policy"], state.kept["loaded"] = scheme, loaded

    def load(pairs: Iterable[tuple[str, Tensor]]) -> None:
        if state.kept.pop("refuse", False):
            raise ArithmeticError("the engine refuses")
        loaded.update({name: tensor.clone() for name, tensor in pairs})

    scheme.init_on_receiver("policy", load=load, worker_idx=0)
    scheme.connect()


def join_with_tensors(state: WorkerState, scheme: wsync.WeightSyncScheme, tensors: Any) -> None:
    """Connect a receiver with a mapping of tensors as its model."""
    state.schemes["policy"], state.kept["loaded"] = scheme, tensors
    scheme.init_on_receiver("policy", model=tensors, worker_idx=0)
    scheme.connect()


def loaded(state: WorkerState) -> dict[str, Any]:
    """Return what the worker has been given."""
    with wsync.gate():
        return {name: tensor.cpu().clone() for name, tensor in state.kept["loaded"].items()}


def refuse_next(state: WorkerState) -> None:
    """Have the engine's function refuse the next version."""
    state.kept["refuse"] = True


class UnlikeEnds(BackendHooks):
    """Transforms, and receivers that are no modules."""

    @contextmanager
    def unlike(self, model: nn.Module, join: Any, *given: Any, **transforms: Any) -> Iterator[tuple[Any, Worker]]:
        """A sender of ``model``, and a worker that has been connected by the command ``join``."""
        with self.workers(1) as workers, self.make_scheme(timeout=TIMEOUT) as scheme:
            for name, transform in transforms.items():
                setattr(scheme, name, transform)
            scheme.init_on_sender("policy", model=model, num_workers=1)
            workers[0].start(join, scheme, *given)
            scheme.connect()
            workers[0].result()
            yield scheme, workers[0]

    @pytest.mark.parametrize("end", ["send_transform", "receive_transform"])
    def test_a_model_of_other_names_shapes_and_precision(self, end: str) -> None:
        """Transformed at either end, the engine has the values of a reference, version by version."""
        model = Trained()
        with self.unlike(model, commands.join, Engine, 0, "policy", **{end: TO_ENGINE}) as (scheme, worker):
            for _ in range(3):
                perturb(model)
                report = scheme.send()
                engine = Engine()
                engine.load_state_dict(in_engine(model))
                assert worker.call(commands.digest) == digest(engine)
                if end == "send_transform":
                    assert report.bytes < 0.6 * sum(parameter.nbytes for parameter in model.parameters())

    def test_quantised_weights_are_off_by_half_a_step_at_most(self) -> None:
        model = nn.Linear(256, 64)
        both = {"send_transform": QuantizeInt8(), "receive_transform": Dequantize()}
        tensors = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
        with self.unlike(model, join_with_tensors, tensors, **both) as (scheme, worker):
            perturb(model)
            report = scheme.send()
            got, step = worker.call(loaded), model.weight.detach().abs().amax(1, keepdim=True) / 127
            assert ((got["weight"] - model.weight.detach()).abs() <= 0.5001 * step).all()
            assert torch.equal(got["bias"], model.bias.detach())
            assert report.bytes < 0.3 * (model.weight.nbytes + model.bias.nbytes)

    def test_an_engine_with_a_function_that_loads(self) -> None:
        """It gets every version whole; what it raises reaches the trainer, and the next version arrives."""
        model = Trained()
        with self.unlike(model, join_with_load, send_transform=TO_ENGINE) as (scheme, worker):
            for _ in range(2):
                perturb(model)
                scheme.send()
                got, expected = worker.call(loaded), in_engine(model)
                assert got.keys() == expected.keys()
                assert all(torch.equal(got[name], expected[name]) for name in got)
            worker.call(refuse_next)
            perturb(model)
            with pytest.raises(wsync.WorkerFailed, match="the engine refuses"):
                scheme.send()
                scheme.send_async()
                scheme.wait_async()
            perturb(model)
            scheme.send()
            assert torch.equal(worker.call(loaded)["qkv.weight"], in_engine(model)["qkv.weight"])

    def test_a_part_of_a_model(self) -> None:
        """Only the part travels; the worker keeps its own values of the rest."""
        model = Trained()
        whole = TensorDict(dict(Trained().state_dict())).unflatten_keys(".")
        before = whole["head", "weight"].clone()
        with self.unlike(model, join_with_tensors, whole, send_transform=Select("q.*", "k.*")) as (scheme, worker):
            perturb(model)
            report = scheme.send()
            got = worker.call(loaded)
            assert torch.equal(got["q"]["weight"], model.q.weight.detach())
            assert torch.equal(got["head"]["weight"], before)
            assert report.bytes < 0.6 * sum(parameter.nbytes for parameter in model.parameters())

    def test_a_partial_update(self) -> None:
        """The rest keeps the values that were sent last, not the trainer's newest; it is one version."""
        with self.connected(make=Trained) as session:
            scheme, model = session.scheme, session.model
            scheme.send()
            expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            for _ in range(3):
                perturb(model)
                expected["k.weight"] = model.state_dict()["k.weight"].clone()
                version = scheme.version
                scheme.send({"k.weight": expected["k.weight"]}, partial=True)
                assert session.versions() == [version + 1] * 2
                reference = Trained()
                reference.load_state_dict(expected)
                assert session.digests() == [digest(reference)] * 2
            scheme.send()
            assert session.digests() == [digest(model)] * 2
            with pytest.raises(wsync.LayoutMismatch, match=r"unknown.*nosuch"):
                scheme.send({"nosuch": torch.zeros(1)}, partial=True)
            with pytest.raises(ValueError, match="all workers"):
                scheme.send({"k.bias": torch.zeros(WIDTH)}, worker_ids=0, partial=True)
            assert session.digests() == [digest(model)] * 2

    def test_differences_are_exact_and_a_missed_base_gets_the_full_weights(self) -> None:
        pytest.importorskip("zstandard", reason="the extra [delta] is not installed")
        with self.differing() as session:
            scheme, model = session.scheme, session.model
            for _ in range(3):
                nudge(model)
                scheme.send()
                assert session.digests() == [digest(model)] * 2
            perturb(model)  # a difference would not be smaller
            scheme.send()
            assert session.digests() == [digest(model)] * 2
            nudge(model)
            scheme.send(worker_ids=0)
            nudge(model)
            scheme.send()  # worker 1 has another base
            assert session.digests() == [digest(model)] * 2
            nudge(model)
            wsync.synchronize({scheme: model})
            assert session.digests() == [digest(model)] * 2
            other = copy.deepcopy(model)
            nudge(other)
            scheme.send({0: model, 1: other})  # two bases of one version
            assert session.digests() == [digest(model), digest(other)]
            nudge(model)
            scheme.send(model)
            assert session.digests() == [digest(model)] * 2

    @contextmanager
    def differing(self) -> Iterator[Session]:
        """A session in which the sender sends differences."""
        with self.workers(2) as workers, self.make_scheme(timeout=TIMEOUT) as scheme:
            scheme.send_transform = Delta()
            model = Wide()
            scheme.init_on_sender("policy", model=model, num_workers=2)
            session = Session(scheme, workers, model, Wide, "policy")
            connect_all(session, first_weights_at_connect=self.first_weights_at_connect)
            yield session

    def test_a_transform_that_does_not_fit_is_an_error_at_connect(self) -> None:
        with self.workers(1) as workers, self.make_scheme(timeout=TIMEOUT) as scheme:
            scheme.receive_transform = Fuse({"qkv.weight": ["q.weight", "o.weight"]})
            scheme.init_on_sender("policy", model=Trained(), num_workers=1)
            workers[0].start(commands.join, scheme, Engine, 0, "policy")
            with pytest.raises(wsync.WeightSyncError, match=r"receive_transform Fuse.*o\.weight"):
                scheme.connect()
                scheme.send()
            with pytest.raises(WorkerError, match=r"receive_transform Fuse.*o\.weight"):
                workers[0].result()
