"""Models that cannot be carried are refused by every backend, with an error that names the tensors, at both ends."""

from __future__ import annotations

import pytest
from backends import BuiltIn
from tensordict import TensorDict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import wsync
from wsync.testing.models import Small, fill


@pytest.mark.usefixtures("group")
def test_sharded_weights_are_refused(backend: BuiltIn) -> None:
    """By name, before anything is sent, also after updates by the fast path."""
    with backend.connected(1, Small, init={}) as session:
        sharded = fill(Small(), 9)
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        for value in (2, 3):
            session.send(value)
        for weights in (sharded, sharded.state_dict(), TensorDict.from_module(sharded)):
            with pytest.raises(wsync.LayoutMismatch, match=r"'weight' is a shard.*DTensor"):
                session.scheme.send(weights)
        assert session.outputs() == [3]
        session.send(4)
        assert session.outputs() == [4]
