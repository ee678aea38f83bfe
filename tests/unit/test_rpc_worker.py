"""The worker's end of calls, and of RPC, without a group."""

from __future__ import annotations

from typing import ClassVar

import cloudpickle
import pytest

from collectors import GymEnv
from collectors.distributed.calls import execute
from collectors.distributed.rpc_worker import RpcWorkerService
from collectors.worker import CommandExecutor, WorkerOptions, WorkerSpec


class FailingClose(GymEnv):
    """Raises when it is closed."""

    def close(self) -> None:
        super().close()
        raise OSError("cannot be closed")


class FailingSeed(GymEnv):
    """Raises when it is seeded; records when it is closed."""

    closed: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__("CartPole-v1")
        self.stepper.seed = self._refuse

    def _refuse(self, seed: int) -> None:
        raise ArithmeticError(f"{seed} is refused")

    def close(self) -> None:
        super().close()
        self.closed.append("closed")


def test_a_failed_worker_closes_its_environment_without_another_call() -> None:
    """A worker in a user's process that is dropped gets no other call."""
    executor = CommandExecutor(lambda options: None)
    spec = cloudpickle.dumps(WorkerSpec(FailingSeed, None, None, {}))
    assert execute(executor, "build", (spec, WorkerOptions(worker_idx=0, frames=4, buffers=1))).kind == "ready"
    failed = execute(executor, "seed", 7)
    assert failed.kind == "error" and "7 is refused" in failed.value
    assert FailingSeed.closed == ["closed"]
    assert execute(executor, "collect", 0).kind == ""
    executor.close()
    assert FailingSeed.closed == ["closed"]


def test_an_environment_that_cannot_be_closed_does_not_block_the_trainer() -> None:
    service = RpcWorkerService(exclusive=False)
    spec = cloudpickle.dumps(WorkerSpec(lambda: FailingClose("CartPole-v1"), None, None, {}))
    ready = service.submit(0, "build", (spec, WorkerOptions(worker_idx=0, frames=4, buffers=1)))
    ended = service.submit(1, "end", None)
    with pytest.raises(OSError, match="cannot be closed"):
        service.run()
    assert ready.value().kind == "ready"
    assert ended.done() and ended.value().kind == "ended"
    assert service.lifetime.done()
