"""The end of a worker that is called by RPC, as its thread does it."""

from __future__ import annotations

import cloudpickle
import pytest

from collectors import GymEnv
from collectors.distributed.rpc_worker import Servant
from collectors.worker import Parts, WorkerOptions


class Obstinate(GymEnv):
    """Does not end well."""

    def close(self) -> None:
        super().close()
        raise OSError("the table is still laid")


def test_an_environment_that_cannot_be_closed_keeps_nobody_waiting() -> None:
    servant = Servant(alone=False)
    parts = cloudpickle.dumps(Parts(lambda: Obstinate("CartPole-v1"), None, None, {}))
    ready = servant.take(0, "build", (parts, WorkerOptions(worker_idx=0, frames=4, buffers=1)))
    ended = servant.take(1, "end", None)
    with pytest.raises(OSError, match="still laid"):
        servant.serve()
    assert ready.value().kind == "ready"
    assert ended.done() and ended.value().kind == "ended"
    assert servant.life.done()
