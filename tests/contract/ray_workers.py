"""Ray actors as workers, in a cluster that the test run starts once."""

import os
import select
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from backends import BuiltIn

from wsync.testing import Worker, WorkerPool
from wsync.testing.commands import WorkerState
from wsync.testing.contract import resources
from wsync.testing.workers import ANSWER_TIMEOUT, execute

START_TIMEOUT = 110.0
"""Seconds until an actor's process has started: it imports torch, while other processes do as well."""

SPARE_ACTORS = 2
"""How many actors are started ahead of the tests that need them."""


def start_cluster(address: str = "local") -> None:
    """Start a cluster, or join the one at ``address``; nothing if this process is in one."""
    if ray.is_initialized():
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address == "local":
        options |= {"num_cpus": 2, "include_dashboard": False}
    # Actors import the modules of tests. With a runtime_env they could not use the processes that Ray keeps ready.
    tests = Path(__file__).parents[1]
    folders = [os.environ.get("PYTHONPATH", ""), str(tests), *map(str, tests.iterdir())]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", os.pathsep.join(folders))
        ray.init(address, **options)


class Actor:
    """A worker: runs commands one after the other."""

    def __init__(self) -> None:
        self.state = WorkerState()

    def pid(self) -> int:
        return os.getpid()

    def execute(self, *command: Any) -> Any:
        return execute(self.state, *command)


class RayWorker(Worker):
    """A Ray actor."""

    def __init__(self) -> None:
        self.actor = ray.remote(Actor).options(num_cpus=0).remote()
        self._refs: list[Any] = []
        self.sentinel = -1

    def wait_until_started(self) -> None:
        self.pid: int = ray.get(self.actor.pid.remote(), timeout=START_TIMEOUT)
        self.sentinel = os.pidfd_open(self.pid)

    def post(self, *command: Any) -> None:
        self._refs.append(self.actor.execute.remote(*command))

    def outcome(self) -> Any:
        return ray.get(self._refs.pop(0), timeout=ANSWER_TIMEOUT)

    def kill(self) -> None:
        self.alive = False
        with suppress(ProcessLookupError):  # the cluster that it was in may have ended before
            signal.pidfd_send_signal(self.sentinel, signal.SIGKILL)
        select.select([self.sentinel], [], [], ANSWER_TIMEOUT)

    def close(self) -> None:
        if self.sentinel >= 0:
            self.kill()
            os.close(self.sentinel)
            self.sentinel = -1


class RayWorkerPool(WorkerPool):
    """Ray actors; as many as a test usually kills are started ahead, since each imports torch."""

    def __init__(self) -> None:
        super().__init__()
        start_cluster()
        self._starting: list[RayWorker] = []

    def start_workers(self, count: int) -> list[Worker]:
        self._starting += [RayWorker() for _ in range(count + SPARE_ACTORS - len(self._starting))]
        started, self._starting = self._starting[:count], self._starting[count:]
        for worker in started:
            worker.wait_until_started()
        return [*started]

    def close(self) -> None:
        super().close()
        self._starting.clear()  # Ray ends actors that have no reference


class Ray(BuiltIn):
    """The backend that has these workers."""

    name = "ray"
    pool_type = RayWorkerPool

    def trainer_resources(self) -> dict[str, Any]:
        """Without descriptors: Ray's client opens and closes its own at any time."""
        found = resources()
        del found["descriptors"]
        return found
