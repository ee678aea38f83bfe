"""Calling forms and updates of every kind, in random order and in alternation."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import PROCESS_BACKENDS
from tensordict import TensorDict
from torch import nn

import wsync
from wsync.testing import Session, WorkerPool
from wsync.testing.commands import WorkerState
from wsync.testing.models import EveryTensorKind, digest, scramble


class TensorsOnly(EveryTensorKind):
    """Without what a TensorDict, or a state dict, does not have."""

    def __init__(self) -> None:
        super().__init__()
        del self.tail, self.scratch


def replace_tensors(state: WorkerState) -> None:
    """Other objects in the same places, and a parameter in another place."""
    model: Any = state.models["policy"]
    with wsync.gate():
        model.norm.running_mean = torch.zeros(8)
        model.scalar = nn.Parameter(torch.tensor(0.0))
        model.conv.weight.data = model.conv.weight.data.clone()


def same(weights: Any) -> Any:
    """A transform; with one, a send takes another way."""
    return weights


def change_buffer(state: WorkerState) -> None:
    """As a BatchNorm in train mode does."""
    model: Any = state.models["policy"]
    with wsync.gate():
        model.norm.running_mean.add_(1.0)


class Trainer:
    """Sends updates in each calling form, and expects each worker's weights.

    Attributes:
        expected: the digest of each worker's model.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.scheme, self.model = session, session.scheme, session.model
        self.seed = 0
        self.expected = [digest(self.model)] * len(session.workers)

    def changed(self, model: Any) -> Any:
        self.seed += 1
        return scramble(model, self.seed)

    def expect_all(self, model: nn.Module) -> None:
        (copy := TensorsOnly()).load_state_dict(model.state_dict())  # strides are those of a worker
        self.expected = [digest(copy)] * len(self.expected)

    def send_without_argument(self) -> None:
        self.changed(self.model)
        self.scheme.send()
        self.expect_all(self.model)

    def send_in_each_form(self) -> None:
        for form in (lambda model: model, lambda model: TensorDict.from_module(model).data, TensorsOnly.state_dict):
            other = TensorsOnly()
            for _ in range(2):
                self.scheme.send(form(self.changed(other)))
            self.expect_all(other)

    def send_to_one_worker(self) -> None:
        self.changed(self.model)
        self.scheme.send(worker_ids=1)
        before = self.expected[0]
        self.expect_all(self.model)
        self.expected[0] = before

    def send_moved_tensors(self) -> None:
        self.model.conv.weight.data = self.model.conv.weight.data.clone(memory_format=torch.preserve_format)
        self.model.scalar = nn.Parameter(torch.tensor(2.5))
        self.model.count = torch.zeros(10, dtype=torch.int64)[::2]
        self.send_without_argument()

    def send_untied_tensors(self) -> None:
        self.model.decode.weight = nn.Parameter(self.model.embed.weight.detach().clone())
        self.scheme.send()
        with pytest.raises(wsync.LayoutMismatch, match="tied"):
            with torch.no_grad():
                self.model.decode.weight.add_(1.0)
            self.scheme.send()
        self.model.decode.weight = self.model.embed.weight
        self.send_without_argument()

    def send_a_wrong_shape(self) -> None:
        self.model.bfloat.data = torch.zeros(3, 5, dtype=torch.bfloat16)
        with pytest.raises(wsync.LayoutMismatch, match="bfloat"):
            self.scheme.send()
        self.model.bfloat.data = torch.zeros(5, 3, dtype=torch.bfloat16)

    def send_async(self) -> None:
        for _ in range(2):
            self.changed(self.model)
            self.scheme.send_async()
        self.scheme.wait_async()
        self.expect_all(self.model)

    def synchronize(self) -> None:
        wsync.synchronize({self.scheme: self.changed(self.model)})
        self.expect_all(self.model)

    def send_after_tensors_were_replaced_in_workers(self) -> None:
        self.session.workers.call(replace_tensors)
        self.send_without_argument()

    def send_after_a_buffer_has_changed_in_workers(self) -> None:
        self.session.workers.call(change_buffer)
        self.send_without_argument()


STEPS: list[Callable[[Trainer], None]] = [
    step for name, step in vars(Trainer).items() if name.startswith(("send", "synchronize"))
]


@pytest.mark.parametrize("options", [{}, {"send_transform": same}], ids=["plain", "transformed"])
@pytest.mark.parametrize("name", PROCESS_BACKENDS)
def test_updates_of_every_kind_in_random_order_arrive(pool: WorkerPool, name: str, options: dict[str, Any]) -> None:
    backend, chance = PROCESS_BACKENDS[name](), random.Random(name)
    type(backend).pool = pool
    with backend.connected(2, TensorsOnly, **options) as session:
        trainer = Trainer(session)
        for step in (*STEPS, *chance.choices(STEPS, k=25)):
            step(trainer)
            version = session.scheme.version
            if chance.random() < 0.7:  # else updates pile up
                assert session.digests() == trainer.expected, step.__name__
                assert session.scheme.version == version
