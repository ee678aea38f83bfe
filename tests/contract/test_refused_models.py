"""Models that cannot be carried are refused by every backend, with an error that names the tensors, at both ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from backends import BuiltIn
from tensordict import TensorDict
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import wsync
from wsync.testing import WorkerError, commands
from wsync.testing.models import Small, fill


class Overlapping(Small):
    """Two parameters that have two of their values in common."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(6)
        self.weight, self.other = nn.Parameter(memory[:4]), nn.Parameter(memory[2:])


class Separate(Small):
    """Two parameters of the same names and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.zeros(4))


OVERLAP = r"(?s)'weight' and 'other'.*overlap"


def test_overlapping_parameters_of_the_sender_are_refused(backend: BuiltIn) -> None:
    with backend.make_scheme(timeout=20.0) as scheme:
        scheme.init_on_sender("policy", model=fill(Overlapping(), 1), num_workers=1)
        with pytest.raises(wsync.LayoutMismatch, match=OVERLAP):
            scheme.connect()


def test_overlapping_parameters_of_a_worker_are_refused(backend: BuiltIn) -> None:
    with backend.workers(1) as workers, backend.make_scheme(timeout=20.0) as scheme:
        scheme.init_on_sender("policy", model=fill(Separate(), 1), num_workers=1)
        workers[0].start(commands.join, scheme, Overlapping, 0, "policy")
        with pytest.raises(wsync.WorkerFailed, match=OVERLAP):
            scheme.connect()
        with pytest.raises(WorkerError, match=OVERLAP):
            workers[0].result()


def test_overlapping_parameters_in_later_weights_are_refused(backend: BuiltIn) -> None:
    with backend.connected(1, Separate, init={}) as session:
        with pytest.raises(wsync.LayoutMismatch, match=OVERLAP):
            session.scheme.send(fill(Overlapping(), 2))
        session.send(3)
        assert session.outputs() == [3]


@pytest.fixture
def group() -> Iterator[None]:
    """A group of one rank, for sharded models."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_sharded_weights_are_refused(backend: BuiltIn) -> None:
    """By name, before anything is sent, also after updates by the fast path."""
    with backend.connected(1, Small, init={}) as session:
        sharded = fill(Small(), 9)
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        for value in (2, 3):
            session.send(value)
        for weights in (sharded, sharded.state_dict(), TensorDict.from_module(sharded)):
            with pytest.raises(wsync.LayoutMismatch, match=r"a shard of 'weight'.*DTensor"):
                session.scheme.send(weights)
        assert session.outputs() == [3]
        session.send(4)
        assert session.outputs() == [4]
