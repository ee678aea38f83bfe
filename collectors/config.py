"""Structured configs of environments and collectors, and which collector can carry which weight sync scheme."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import gymnasium
from omegaconf import MISSING

from collectors.envs import GymEnv
from wsync.config import store_once

LOCAL_SCHEMES = frozenset({"SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme", "NoWeightSyncScheme"})
CARRIES = {
    "collectors.MultiSyncCollector": LOCAL_SCHEMES,
    "collectors.MultiAsyncCollector": LOCAL_SCHEMES,
    "collectors.distributed.DistributedCollector": frozenset({"DistributedWeightSyncScheme", "NoWeightSyncScheme"}),
    "collectors.distributed.RPCCollector": frozenset(
        {"RPCWeightSyncScheme", "DistributedWeightSyncScheme", "NoWeightSyncScheme"}
    ),
    "collectors.distributed.RayCollector": frozenset(
        {"RayWeightSyncScheme", "DistributedWeightSyncScheme", "NoWeightSyncScheme"}
    ),
}
IN_PROCESS = "collectors.Collector"
SOLVED_AT = {"Pendulum-v1": -200.0}
"""Mean returns that count as solved, of environments for which Gymnasium registers none."""


class ConfigError(ValueError):
    """Settings that do not go together, or an environment that there is not; the message is one line."""


@dataclass
class EnvConfig:
    """A Gymnasium environment.

    Attributes:
        id: as registered; ``module:id`` imports the module first.
        solved_at: mean return of 100 episodes that counts as solved; None: what is known of the id, if anything.
        max_episode_steps: cut episodes after so many steps; None: the environment's own limit.
        kwargs: for ``gymnasium.make``.
    """

    id: str = MISSING
    solved_at: float | None = None
    max_episode_steps: int | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class CollectorConfig:
    """A collector; the number of workers, of environments and of frames per batch are the run's own, at top level.

    Attributes:
        init_random_frames: frames to collect with random actions first.
    """

    _target_: str = MISSING
    init_random_frames: int = 0


@dataclass
class SingleConfig(CollectorConfig):
    """Collects in this very process."""

    _target_: str = IN_PROCESS


@dataclass
class CrewConfig(CollectorConfig):
    """Several workers; some of them may fail.

    Attributes:
        on_worker_failure: ``raise``; ``drop`` the worker and go on with the others; or ``restart`` it meanwhile.
        worker_timeout: seconds in which a worker has to answer; null: no limit.
        max_restarts: a worker that fails more often than this within `restart_window` seconds, or since its last batch,
            ends the run after all.
        restart_window: see `max_restarts`.
    """

    on_worker_failure: str = "raise"
    worker_timeout: float | None = 600.0
    max_restarts: int = 10
    restart_window: float = 60.0


@dataclass
class MultiSyncConfig(CrewConfig):
    """Worker processes; a batch has a share of each, and all wait for new weights."""

    _target_: str = "collectors.MultiSyncCollector"
    cat_results: Any = "stack"  # or a dimension, which is a number


@dataclass
class MultiAsyncConfig(CrewConfig):
    """Worker processes that go on while the learner learns; a batch is one worker's."""

    _target_: str = "collectors.MultiAsyncCollector"


@dataclass
class RemoteConfig(CrewConfig):
    """Workers that are reached over a network.

    Attributes:
        sync: whether a batch has a share of each worker, and all wait for new weights; otherwise it is one worker's.
        timeout: seconds in which the workers have to be there.
    """

    sync: bool = True
    cat_results: Any = "stack"  # or a dimension, which is a number
    timeout: float = 60.0
    _convert_: str = "all"  # lists and dictionaries reach the collector as such


@dataclass
class DistributedConfig(RemoteConfig):
    """Workers that are reached over TCP: processes of this machine, or whatever joins; see ``DistributedCollector``."""

    _target_: str = "collectors.distributed.DistributedCollector"
    launcher: str = "local"
    host: str | None = None
    port: int = 0


@dataclass
class RPCConfig(RemoteConfig):
    """Workers that are called by ``torch.distributed.rpc``; see ``RPCCollector``."""

    _target_: str = "collectors.distributed.RPCCollector"
    workers: list[str] | None = None
    host: str = "127.0.0.1"


@dataclass
class RayConfig(RemoteConfig):
    """Ray actors; see ``RayCollector``."""

    _target_: str = "collectors.distributed.RayCollector"
    address: str | None = None
    resources: dict[str, Any] = field(default_factory=dict)
    scheduling_strategy: str = "DEFAULT"


@dataclass
class ChaosConfig:
    """Faults that are made on purpose, in the workers of a run; see ``collectors.chaos.Monkey``."""

    _target_: str = "collectors.chaos.Monkey"
    faults: list[str] = field(default_factory=list)
    rate: float = 12.0
    seed: int = 1
    pause: float = 2.0
    limit: int | None = None


def check(collector: str, scheme: str, num_workers: int) -> None:
    """Raise ConfigError if the `collector` cannot carry the `scheme` (dotted names), or not with so many workers."""
    name, scheme_name = collector.rpartition(".")[2], scheme.rpartition(".")[2]
    if collector == IN_PROCESS and num_workers != 1:
        raise ConfigError(f"{name} works in the trainer's process: num_workers is 1 there, not {num_workers}")
    carried = CARRIES.get(collector, frozenset({scheme_name}))  # somebody's own collector knows what it carries
    if scheme.startswith("wsync.") and scheme_name not in carried:
        raise ConfigError(f"{name} cannot carry {scheme_name}, only {', '.join(sorted(carried))}")


_TAKEN = {
    "env": "say env.id=…",
    "num_envs": "say num_envs=…",
    "seed": "say seed=…",
    "max_frames_per_traj": "say env.max_episode_steps=…",
    "transforms": "they are given to GymEnv in Python",
}
"""What ``GymEnv`` would take for itself of an environment's keyword arguments."""


def sample(env: EnvConfig) -> GymEnv:
    """Make one environment, to look at its specs; raise ConfigError if there is no such environment."""
    for name in env.kwargs.keys() & _TAKEN.keys():
        raise ConfigError(f"env.kwargs.{name} would not reach gymnasium.make: {_TAKEN[name]}")
    try:
        return GymEnv(env.id, **env.kwargs)
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        raise ConfigError(f"env.id={env.id}: {' '.join(str(error).split())}") from error


def solved_at(env: EnvConfig) -> float | None:
    """Return the mean return that counts as solved: the config's, else that of the id; None if nobody knows any."""
    if env.solved_at is not None:
        return env.solved_at
    name = env.id.rpartition(":")[2]  # the module before the colon was imported by now
    return SOLVED_AT.get(name, gymnasium.spec(name).reward_threshold)


def register_configs() -> None:
    """Add the groups ``env``, ``collector`` and ``chaos`` to Hydra's ConfigStore, as ``base_<name>``."""
    store_once("env", "base_gym", EnvConfig)
    store_once("collector", "base_single", SingleConfig)
    store_once("collector", "base_multi_sync", MultiSyncConfig)
    store_once("collector", "base_multi_async", MultiAsyncConfig)
    store_once("collector", "base_distributed", DistributedConfig)
    store_once("collector", "base_rpc", RPCConfig)
    store_once("collector", "base_ray", RayConfig)
    store_once("chaos", "base_chaos", ChaosConfig)
