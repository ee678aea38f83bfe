"""Models that cannot be carried are refused by every backend, with an error that names the tensors, at both ends."""

from __future__ import annotations

import pytest
import torch
from backends import BuiltIn
from small_models import TwoWeights
from tensordict import TensorDict
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


def test_overlapping_parameters_of_a_worker_are_refused(backend: BuiltIn) -> None:
    """For other cases, at either end: tests/unit/test_weights.py."""
    overlap = r"(?s)'weight' and 'other'.*overlap"
    with backend.workers(1) as workers, backend.make_scheme(timeout=20.0) as scheme:
        scheme.init_on_sender("policy", model=fill(TwoWeights(), 1), num_workers=1)
        workers[0].start(commands.join, scheme, Overlapping, 0, "policy")
        with pytest.raises(wsync.WorkerFailed, match=overlap):
            scheme.connect()
        with pytest.raises(WorkerError, match=overlap):
            workers[0].result()


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
