"""Ray actors as workers. They take seconds to start, so those that have survived a test serve the next one, emptied."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from contract_models import Tail
from crew import PATIENCE, Host, Remote, obey

_idle: list[RayRemote] = []


class Actor:
    """A worker: does what it is told, one after the other."""

    def __init__(self) -> None:
        self.host = Host()

    def pid(self) -> int:
        return os.getpid()

    def obey(self, method: str, args: Any) -> tuple[bool, Any]:
        return obey(self.host, method, args)

    def reset(self) -> None:
        self.host.shutdown()
        self.host = Host()
        Tail.worker = -1


class RayRemote(Remote):
    """A Ray actor."""

    def __init__(self) -> None:
        self.actor = ray.remote(Actor).options(num_cpus=0).remote()
        self.refs: list[Any] = []

    def ready(self) -> RayRemote:
        pid = ray.get(self.actor.pid.remote(), timeout=PATIENCE)
        self.process = SimpleNamespace(pid=pid, sentinel=os.pidfd_open(pid), join=lambda patience: None)
        return self

    def start(self, method: str, *args: Any) -> None:
        self.refs.append(self.actor.obey.remote(method, args))

    def answer(self) -> tuple[bool, Any]:
        return ray.get(self.refs.pop(0), timeout=PATIENCE)

    def close(self) -> None:
        self.refs.clear()
        try:
            ray.get(self.actor.reset.remote(), timeout=PATIENCE)
            _idle.append(self)
        except ray.exceptions.RayActorError:  # the test has killed it
            os.close(self.process.sentinel)


def dismiss() -> None:
    """End the cluster, and all actors with it."""
    for remote in _idle:
        os.close(remote.process.sentinel)
    _idle.clear()
    ray.shutdown()


def begin(address: str = "") -> None:
    """Have a cluster: one of one's own, or the one at ``address``."""
    if ray.is_initialized():
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if not address:
        options |= {"num_cpus": 2, "include_dashboard": False}
    tests = Path(__file__).parents[1]
    places = ":".join(str(place) for place in (tests, tests / "contract", tests / "chaos"))
    # Actors unpickle what is there. With a runtime_env they could not have the processes that Ray has begun already.
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", places)
        ray.init(address or "local", **options)


def hire(count: int) -> list[Remote]:
    """``count`` actors."""
    hired: list[Any] = [_idle.pop() for _ in range(min(count, len(_idle)))]
    fresh = [RayRemote() for _ in range(count - len(hired))]
    return [*hired, *(remote.ready() for remote in fresh)]
