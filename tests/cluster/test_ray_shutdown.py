"""``ray.shutdown`` while schemes, collectors and transforms live: they say so, start no other Ray, and let one be."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import ray
import torch
from tensordict import TensorDict
from torch import nn

import wsync
from collectors import GymEnv, RayModuleTransform
from collectors.distributed import RayCollector

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_cluster")]


def actor() -> Any:
    class Worker:
        """A user's actor."""

        def __init__(self) -> None:
            self.policy = nn.Linear(1, 1)

    return ray.remote(Worker).options(num_cpus=0).remote()


def test_wrong_options_of_actors_leave_no_cluster() -> None:
    with pytest.raises(ValueError, match="gpu"):
        RayCollector([lambda: GymEnv("CartPole-v1")], frames_per_batch=8, resources={"gpu": 1})
    assert not ray.is_initialized()


def test_what_ray_shutdown_has_ended_says_so_and_lets_the_next_ray_be() -> None:
    idle = RayCollector([lambda: GymEnv("CartPole-v1")], frames_per_batch=8)  # has started the cluster
    asked = RayCollector([lambda: GymEnv("CartPole-v1")], frames_per_batch=8)
    rewards = RayModuleTransform(nn.Identity, [("next", "reward")], [("next", "reward")])
    env = GymEnv("CartPole-v1", transforms=[rewards])
    scheme = wsync.RayWeightSyncScheme(timeout=60.0)
    scheme.init_on_sender("policy", model=nn.Linear(1, 1), actors=[actor()])
    scheme.connect()

    ray.shutdown()
    with pytest.raises(wsync.WorkerDied, match=r"worker 0 .*ray\.shutdown\(\)"):
        next(asked)
    with pytest.raises(wsync.NotConnected, match="cannot be reached"):
        env.step(TensorDict({"action": torch.tensor(0)}, []))
    with pytest.raises(wsync.NotConnected, match=r"ray\.shutdown\(\)"):
        scheme.readmit(0)
    with pytest.raises(wsync.WeightSyncError):
        scheme.send()
    assert not ray.is_initialized(), "no other Ray has been started"

    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    for of_the_other_ray in (scheme, rewards, idle):
        of_the_other_ray.shutdown()
    assert ray.is_initialized()
    ray.shutdown()
