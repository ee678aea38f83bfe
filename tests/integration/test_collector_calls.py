"""What collectors return, how they are called, and what they warn of."""

from __future__ import annotations

import inspect
from typing import Any

import gymnasium
import pytest
from torch import nn

import wsync
from collectors import BaseCollector, Collector, GymEnv, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from collectors.distributed import DistributedCollector, RayCollector, RPCCollector
from learning import make_policy

ALL = [
    *(Collector, MultiCollector, MultiSyncCollector, MultiAsyncCollector),
    *(DistributedCollector, RPCCollector, RayCollector),
]
EVERYWHERE = {
    *("create_env_fn", "policy", "frames_per_batch", "total_frames"),
    *("weight_sync_schemes", "max_frames_per_traj"),
}


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1")


def network() -> nn.Module:
    env = make_env()
    return make_policy(env.observation_spec["observation"].shape[-1], env.action_spec)


def test_statistics_of_each_worker_are_refused_unless_they_are_fixed() -> None:
    def normalized(fixed: bool) -> GymEnv:
        env = gymnasium.wrappers.NormalizeObservation(gymnasium.make("CartPole-v1"))
        env.update_running_mean = not fixed
        return GymEnv(gymnasium.wrappers.TimeLimit(env, 9))

    with pytest.raises(wsync.WorkerFailed, match="NormalizeObservation has statistics of its own"):
        MultiSyncCollector([lambda: normalized(False)], network(), frames_per_batch=16)
    with MultiSyncCollector([lambda: normalized(True)], network(), frames_per_batch=16) as collector:
        assert next(collector).numel() == 16


# --- reports ---


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_an_update_returns_its_report(cls: Any) -> None:
    policy = network()
    schemes = {"policy": wsync.SharedMemWeightSyncScheme(), "mean": wsync.SharedMemWeightSyncScheme()}
    policy.mean = nn.Linear(4, 1)  # pyright: ignore[reportArgumentType]
    with cls([make_env], policy, frames_per_batch=16, weight_sync_schemes=schemes) as collector:
        report = collector.update_policy_weights_()
        assert isinstance(report, wsync.SyncReport)
        assert (report.version, dict(report.workers)) == (2, {0: 2}) and report.seconds > 0
        assert report == schemes["policy"].metrics.last
        both = collector.update_policy_weights_(weights_dict={"policy": policy, "mean": policy.mean})
        assert {name: one.version for name, one in both.items()} == {"policy": 3, "mean": 2}


# --- signatures ---


@pytest.mark.parametrize("cls", ALL)
def test_signatures_name_every_argument(cls: type[BaseCollector]) -> None:
    shown = inspect.signature(cls)
    assert set(shown.parameters) >= EVERYWHERE
    kinds = {one.kind for one in shown.parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    assert shown.parameters["total_frames"].default == -1


class Own(MultiSyncCollector):
    """A user's subclass, which passes its arguments on."""

    def __init__(self, *arguments: Any, colour: str = "red", **options: Any) -> None:
        self.colour = colour
        super().__init__(*arguments, **options)


class OfOneSize(MultiSyncCollector):
    """A user's subclass with fewer arguments."""

    def __init__(self, create_env_fn: Any) -> None:
        super().__init__(create_env_fn, frames_per_batch=16)


@pytest.mark.slow
def test_subclasses_of_users() -> None:
    with Own([make_env], frames_per_batch=16, colour="blue") as collector:
        assert collector.colour == "blue"
    with OfOneSize([make_env]) as collector:
        assert next(collector).numel() == 16
    assert "colour" in inspect.signature(Own).parameters
