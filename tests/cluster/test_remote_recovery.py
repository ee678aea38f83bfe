"""Workers over TCP, RPC and Ray that die, stall, raise and come back (or are refused to)."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
import torch
from ray_workers import START_TIMEOUT
from tensordict import TensorDictBase
from torch import nn

from collectors.distributed import DistributedCollector, RayCollector, RPCCollector

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no worker has this file in its path

FAMILIES = {"tcp": DistributedCollector, "rpc": RPCCollector, "ray": RayCollector}


class Pids(gymnasium.Env):
    """Observes the process that it is in."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return np.full(1, os.getpid(), np.float64), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.full(1, os.getpid(), np.float64), 0.0, False, False, {}


class Telling(nn.Module):
    """Writes down what its weight and its buffer are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("mark", torch.ones(1))

    def become(self, value: int) -> None:
        with torch.no_grad():
            self.weight.fill_(value)
            self.get_buffer("mark").fill_(value)

    def forward(self, observation: TensorDictBase) -> TensorDictBase:
        observation.set("told", torch.stack([self.weight[0], self.get_buffer("mark")[0]]).detach())
        return observation.set("action", torch.tensor(0))


def collect(family: str, failure: str, **options: Any) -> Any:
    if family == "ray":
        options.setdefault("timeout", START_TIMEOUT)
    return FAMILIES[family]([Pids] * 2, Telling(), frames_per_batch=16, on_worker_failure=failure, **options)


def pids(batch: TensorDictBase) -> list[int]:
    """By worker, in a synchronous batch."""
    return [int(pid) for pid in batch["observation"].flatten().unique_consecutive().tolist()]


def update(collector: Any, value: int) -> None:
    collector.policy.become(value)
    collector.update_policy_weights_()


def until_both(collector: Any, gone: int) -> list[int]:
    for _ in range(20_000):
        batch = next(collector)
        assert gone not in pids(batch) or not collector.failures
        if len(pids(batch)) == 2 and gone not in pids(batch):
            return pids(batch)
    raise AssertionError("the worker did not come back")


@pytest.mark.parametrize(("family", "victims"), [("tcp", (1, 0)), pytest.param("ray", (1,), marks=pytest.mark.slow)])
def test_a_worker_comes_back_with_the_newest_weights(family, victims):
    with collect(family, "restart") as collector:
        first = pids(next(collector))
        for victim in victims:
            os.kill(first[victim], signal.SIGKILL)
            update(collector, 3)
            second = until_both(collector, first[victim])
            assert second[1 - victim] == first[1 - victim]
            assert next(collector)["told"].unique().tolist() == [3]
            update(collector, 4 + victim)
            assert next(collector)["told"].unique().tolist() == [4 + victim]
            first = second
        assert collector.failures.failed == collector.failures.restarted == dict.fromkeys(victims, 1)


def test_restart_of_workers_that_cannot_be_restarted_is_refused():
    with pytest.raises(ValueError, match="does not take a member back"):
        collect("rpc", "restart")
    with pytest.raises(ValueError, match="workers that join"):
        collect("tcp", "restart", launcher="join")
