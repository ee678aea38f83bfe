"""What collectors return, how they are called, and what they warn of."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    set_interaction_type,
)
from tensordict.nn.distributions import Delta
from torch import nn

import wsync
from collectors import BaseCollector, Collector, GymEnv, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from collectors.distributed import DistributedCollector, RayCollector, RPCCollector
from learning import make_policy

ROOT = Path(__file__).resolve().parents[2]
ALL = [
    Collector,
    MultiCollector,
    MultiSyncCollector,
    MultiAsyncCollector,
    DistributedCollector,
    RPCCollector,
    RayCollector,
]
EVERYWHERE = {
    "create_env_fn",
    "policy",
    "frames_per_batch",
    "total_frames",
    "weight_sync_schemes",
    "max_frames_per_traj",
}


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1")


def network() -> nn.Module:
    env = make_env()
    return make_policy(env.observation_spec["observation"].shape[-1], env.action_spec)


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


def test_an_update_with_restarts_returns_its_report_as_well() -> None:
    options: dict[str, Any] = {"frames_per_batch": 16, "on_worker_failure": "restart"}
    with MultiSyncCollector([make_env] * 2, network(), **options) as collector:
        report = collector.update_policy_weights_()
        assert report is not None and set(report.workers) == {0, 1}


def test_a_control_has_no_report() -> None:
    schemes = {"policy": wsync.NoWeightSyncScheme()}
    with Collector(make_env, network(), frames_per_batch=16, weight_sync_schemes=schemes) as collector:
        assert collector.update_policy_weights_() is None


# --- signatures ---


class Own(MultiSyncCollector):
    """A user's subclass, which passes its arguments on."""

    def __init__(self, *arguments: Any, colour: str = "red", **options: Any) -> None:
        self.colour = colour
        super().__init__(*arguments, **options)


class OfOneSize(MultiSyncCollector):
    """A user's subclass with fewer arguments."""

    def __init__(self, create_env_fn: Any) -> None:
        super().__init__(create_env_fn, frames_per_batch=16)


def test_subclasses_of_users() -> None:
    with Own([make_env], frames_per_batch=16, colour="blue") as collector:
        assert collector.colour == "blue"
    with OfOneSize([make_env]) as collector:
        assert next(collector).numel() == 16


# --- a probabilistic policy that acts greedily ---


def probabilistic(kind: InteractionType, distribution: Any = torch.distributions.Categorical) -> TensorDictModule:
    logits = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"])
    draw = ProbabilisticTensorDictModule(
        in_keys=["logits"], out_keys=["action"], distribution_class=distribution, default_interaction_type=kind
    )
    return ProbabilisticTensorDictSequential(logits, draw)


class Greedy:
    """A picklable function that makes a policy."""

    def __call__(self) -> TensorDictModule:
        return probabilistic(InteractionType.DETERMINISTIC)


def warned(make: Callable[[], BaseCollector]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make().shutdown()
    assert all(one.filename == __file__ for one in caught if "greedily" in str(one.message))
    return [str(one.message) for one in caught if "greedily" in str(one.message)]


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_one_warning_before_a_probabilistic_policy_acts_greedily(cls: Any) -> None:
    makers: Any = [make_env]
    several: Any = makers if cls is Collector else makers * 2
    (said,) = warned(lambda: cls(several, probabilistic(InteractionType.MODE), frames_per_batch=16))
    assert "(Categorical)" in said and "default_interaction_type=MODE" in said and "RANDOM" in said
    assert not warned(lambda: cls(makers, probabilistic(InteractionType.RANDOM), frames_per_batch=16))
    with set_interaction_type(InteractionType.DETERMINISTIC):
        assert not warned(lambda: cls(makers, probabilistic(InteractionType.MODE), frames_per_batch=16))
    with set_interaction_type(InteractionType.RANDOM):  # reaches no other process
        told = warned(lambda: cls(makers, probabilistic(InteractionType.MODE), frames_per_batch=16))
    assert len(told) == (0 if cls is Collector else 1)


def test_a_policy_of_a_factory_is_looked_at_as_well() -> None:
    assert len(warned(lambda: Collector(make_env, policy_factory=Greedy(), frames_per_batch=16))) == 1


IN_WORKERS = """
from collectors import GymEnv, MultiSyncCollector
from test_collector_calls import Greedy, make_env

if __name__ == "__main__":
    MultiSyncCollector([make_env] * 2, policy_factory=Greedy(), frames_per_batch=16).shutdown()
"""


@pytest.mark.slow
def test_one_worker_warns_of_a_policy_of_its_factory(tmp_path: Path) -> None:
    (tmp_path / "in_workers.py").write_text(IN_WORKERS, encoding="utf-8")
    folders = os.pathsep.join(map(str, (ROOT, Path(__file__).parent)))
    done = subprocess.run(
        [sys.executable, tmp_path / "in_workers.py"], capture_output=True, text=True, timeout=250, check=False,
        env={**os.environ, "PYTHONPATH": folders},
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("acts greedily")) == (0, 1), done.stderr


def test_policies_that_are_certain_or_add_noise_are_no_reason_to_warn() -> None:
    def add_noise(action: torch.Tensor) -> torch.Tensor:
        return action

    greedy = probabilistic(InteractionType.DETERMINISTIC)
    noise = TensorDictModule(add_noise, in_keys=["action"], out_keys=["action"])
    certain = TensorDictSequential(
        TensorDictModule(lambda observation: (observation[..., 0] > 0).long(), ["observation"], ["param"]),
        ProbabilisticTensorDictModule(in_keys=["param"], out_keys=["action"], distribution_class=Delta),
    )
    for policy in (TensorDictSequential(greedy, noise), certain, network(), None):
        assert not warned(lambda policy=policy: Collector(make_env, policy, frames_per_batch=16))
