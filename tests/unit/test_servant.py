"""The end of a worker that is called by RPC, as its thread does it."""

from __future__ import annotations

from typing import ClassVar

import cloudpickle
import pytest

from collectors import GymEnv
from collectors.distributed.called import CalledCore
from collectors.distributed.rpc_worker import Servant
from collectors.workers.worker import Parts, WorkerOptions


class Obstinate(GymEnv):
    """Does not end well."""

    def close(self) -> None:
        super().close()
        raise OSError("the table is still laid")


class Failing(GymEnv):
    """Cannot be seeded, and says when it is closed."""

    closed: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__("CartPole-v1")
        self.stepper.seed = self._refuse

    def _refuse(self, seed: int) -> None:
        raise ArithmeticError(f"{seed} is no number")

    def close(self) -> None:
        super().close()
        self.closed.append("closed")


def test_a_worker_that_has_failed_lets_go_of_its_environment_though_nobody_tells_it_to_end() -> None:
    """As one in a process of the user's own that is dropped."""
    core = CalledCore(lambda options: None)
    parts = cloudpickle.dumps(Parts(Failing, None, None, {}))
    assert core.obey("build", (parts, WorkerOptions(worker_idx=0, frames=4, buffers=1))).kind == "ready"
    failed = core.obey("seed", 7)
    assert failed.kind == "error" and "7 is no number" in failed.value
    assert Failing.closed == ["closed"]
    assert core.obey("collect", 0).kind == ""
    core.close()
    assert Failing.closed == ["closed"]


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
