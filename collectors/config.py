"""Structured configs of environments and collectors, and which collectors can carry a scheme."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import gymnasium
from hydra.utils import instantiate
from omegaconf import MISSING

from collectors.environments.vector import with_version
from collectors.environments.wrappers import build
from collectors.envs import GymEnv
from wsync import WeightSyncScheme
from wsync.config import store_once

SOLVED_AT = {"Pendulum-v1": -200.0}
"""Mean returns that count as solved, of environments without a reward threshold in Gymnasium."""

REWARDS = ("raw", "normalized", "sign")
"""The possible values of ``env.rewards``."""


class ConfigError(ValueError):
    """Settings contradict each other, or there is no such environment; the message is one line."""


@dataclass
class EnvConfig:
    """A Gymnasium environment.

    Attributes:
        id: as registered; ``module:id`` imports the module first.
        solved_at: mean return of 100 episodes that counts as solved; None: the known value of the id, if there is one.
        max_episode_steps: episodes are truncated after this number of steps; None: the environment's own limit.
        kwargs: for ``gymnasium.make``.
        wrappers: put around each environment, the first one innermost: ``_target_`` and further arguments of each.
        make: instead of `id` and `kwargs`: the ``_target_`` and the arguments of a function that makes an environment.
        normalize_observations: subtract the mean of all observations and divide by their standard deviation.
        rewards: what the learner gets: ``raw``, ``normalized`` (divided by the standard deviation of the discounted
            return) or ``sign``. Reported returns are those of the environment.
    """

    id: str = MISSING
    solved_at: float | None = None
    max_episode_steps: int | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    wrappers: list[Any] = field(default_factory=list)
    make: Any = None
    normalize_observations: bool = False
    rewards: str = "raw"


@dataclass
class CollectorConfig:
    """A collector; the numbers of workers, environments and frames per batch are settings of the run, at top level.

    Attributes:
        init_random_frames: number of first frames with random actions.
        max_staleness: versions, at most, that the newest weights may be ahead of those that acted in any frame of a
            batch when the learner gets it; older ones are dropped and collected anew. null: no limit.
    """

    _target_: str = MISSING
    init_random_frames: int = 0
    max_staleness: int | None = None


@dataclass
class SingleConfig(CollectorConfig):
    """Collects in the trainer's process."""

    _target_: str = "collectors.Collector"


@dataclass
class WorkerCollectorConfig(CollectorConfig):
    """Several workers.

    Attributes:
        on_worker_failure: ``raise``; ``drop`` the worker and continue; or ``restart`` it and continue meanwhile.
        worker_timeout: seconds in which a worker has to answer; null: no limit.
        max_restarts: more failures of a worker than this within `restart_window` seconds, or since its last batch, end
            the run.
        restart_window: see `max_restarts`.
    """

    on_worker_failure: str = "raise"
    worker_timeout: float | None = 600.0
    max_restarts: int = 10
    restart_window: float = 60.0


@dataclass
class MultiSyncConfig(WorkerCollectorConfig):
    """Worker processes; a batch has a share of every worker, and all wait for new weights."""

    _target_: str = "collectors.MultiSyncCollector"
    cat_results: Any = "stack"  # or a dimension, which is a number


@dataclass
class MultiAsyncConfig(WorkerCollectorConfig):
    """Worker processes that collect while the learner learns; a batch is one worker's.

    Attributes:
        run_ahead: batches that a worker begins, at most, before the learner has taken the one before them.
    """

    _target_: str = "collectors.MultiAsyncCollector"
    run_ahead: int = 1


@dataclass
class RemoteConfig(WorkerCollectorConfig):
    """Workers that are reached over a network.

    Attributes:
        sync: whether a batch has a share of every worker, and all wait for new weights; otherwise it is one worker's.
        run_ahead: with `sync=false`, as that of `multi_async`; null: 1 there.
        timeout: seconds in which the workers have to join.
    """

    sync: bool = True
    run_ahead: int | None = None
    cat_results: Any = "stack"  # or a dimension, which is a number
    timeout: float = 60.0
    _convert_: str = "all"  # the collector gets plain lists and dictionaries


@dataclass
class DistributedConfig(RemoteConfig):
    """Workers that are reached over TCP: processes of this machine, or workers that join; see DistributedCollector."""

    _target_: str = "collectors.distributed.DistributedCollector"
    launcher: str = "local"
    host: str | None = None
    port: int = 0


@dataclass
class RPCConfig(RemoteConfig):
    """Workers that are called by ``torch.distributed.rpc``; see RPCCollector."""

    _target_: str = "collectors.distributed.RPCCollector"
    workers: list[str] | None = None
    host: str = "127.0.0.1"


@dataclass
class RayConfig(RemoteConfig):
    """Ray actors; see RayCollector."""

    _target_: str = "collectors.distributed.RayCollector"
    address: str | None = None
    resources: dict[str, Any] = field(default_factory=dict)
    scheduling_strategy: str = "DEFAULT"


@dataclass
class ChaosConfig:
    """Faults that are injected into the workers of a run; see ``collectors.chaos.Monkey``."""

    _target_: str = "collectors.chaos.Monkey"
    faults: list[str] = field(default_factory=list)
    rate: float = 12.0
    seed: int = 1
    pause: float = 2.0
    limit: int | None = None


BUNDLED: dict[str, CollectorConfig] = {
    "single": SingleConfig(),
    "multi_sync": MultiSyncConfig(),
    "multi_async": MultiAsyncConfig(),
    "distributed": DistributedConfig(),
    "distributed_async": DistributedConfig(sync=False),
    "rpc": RPCConfig(),
    "rpc_async": RPCConfig(sync=False),
    "ray": RayConfig(),
    "ray_async": RayConfig(sync=False),
}
"""The collectors of this package, by the options of the group ``collector``."""


def check(collector: Any, scheme: object, num_workers: int) -> None:
    """Check that a collector can carry a scheme (``WeightSyncScheme.collectors``), and has a valid number of workers.

    The collector in the trainer's process takes every scheme. Collectors of other packages are not checked.

    Args:
        collector: the collector's config.
        scheme: the scheme.
        num_workers: number of workers.

    Raises:
        ConfigError: it cannot, or `scheme` is none.
    """
    if not isinstance(scheme, WeightSyncScheme):
        raise ConfigError("weight_sync is no scheme: name a subclass of WeightSyncScheme in its YAML file by _target_")
    option = next((option for option, bundled in BUNDLED.items() if _kind(bundled) == _kind(collector)), None)
    if option == "single":
        if num_workers != 1:
            raise ConfigError(f"Collector works in the trainer's process: num_workers is 1 there, not {num_workers}")
    elif option is not None and option not in scheme.collectors:
        can = f"choose collector={', '.join(scheme.collectors)}" if scheme.collectors else "no collector can"
        raise ConfigError(f"collector={option} cannot carry {type(scheme).__name__}: {can}")


def _kind(collector: Any) -> tuple[str, bool | None] | None:
    """Return what tells the bundled collectors apart; None for a config that is not based on theirs."""
    if not isinstance(collector, CollectorConfig):
        return None
    return collector._target_, collector.sync if isinstance(collector, RemoteConfig) else None


_ARGUMENTS_OF_GYM_ENV = {
    "env": "say env.id=…",
    "num_envs": "say num_envs=…",
    "seed": "say seed=…",
    "max_frames_per_traj": "say env.max_episode_steps=…",
    "transforms": "they are given to GymEnv in Python",
}
"""Arguments of ``GymEnv`` itself, which would not reach the environment."""

EXTRAS = {"mujoco": "mujoco", "ale_py": "atari", "cv2": "atari"}
"""The extra of this package that installs a module which environments need."""


def env_config(env: Any) -> EnvConfig:
    """Return the settings of an environment; in a plain YAML file with a ``_target_``, its arguments.

    Raises:
        ConfigError: the file names no ``_target_``.
    """
    if isinstance(env, EnvConfig):
        return env
    if not isinstance(env, Mapping) or "_target_" not in env:
        raise ConfigError("env has no _target_: name the function that makes an environment, or begin with base_gym")
    ours = {field.name for field in fields(EnvConfig)} - {"kwargs", "make"}
    make = {str(name): value for name, value in env.items() if name not in ours}
    own: dict[str, Any] = {str(name): value for name, value in env.items() if name in ours}
    return EnvConfig(**({"id": env["_target_"]} | own), make=make)


def env_factory(env: EnvConfig, num_envs: int | None) -> Callable[[], GymEnv]:
    """Return what makes `num_envs` environments that are stepped together; picklable."""
    source: Any = env.id
    kwargs = env.kwargs
    if env.make is not None or env.wrappers:
        to_one = {name: value for name, value in kwargs.items() if name != "vectorization_mode"}
        make = partial(gymnasium.make, env.id, **to_one) if env.make is None else instantiate(env.make, _partial_=True)
        source, kwargs = partial(build, make, [instantiate(one, _partial_=True) for one in env.wrappers]), {}
    return partial(GymEnv, source, num_envs, max_frames_per_traj=env.max_episode_steps, **kwargs)


def sample(env: EnvConfig) -> GymEnv:
    """Make one environment, for its specs.

    Raises:
        ConfigError: there is no such environment, a package is missing, or it does not take the arguments.
    """
    for name in env.kwargs.keys() & _ARGUMENTS_OF_GYM_ENV.keys():
        raise ConfigError(f"env.kwargs.{name} would not reach gymnasium.make: {_ARGUMENTS_OF_GYM_ENV[name]}")
    for i, one in enumerate(env.wrappers):
        if not isinstance(one, Mapping) or "_target_" not in one:
            raise ConfigError(f"env.wrappers[{i}] has no _target_: name the class of the wrapper")
    if env.rewards not in REWARDS:
        raise ConfigError(f"env.rewards={env.rewards}: it is one of {', '.join(REWARDS)}")
    try:
        return env_factory(env, None)()
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        detail = " ".join(str(error).split()).rstrip(".?")
        raise ConfigError(f"env.id={env.id}: {detail}{_extra(error)}") from error


def _extra(error: BaseException) -> str:
    """Return what to install, if `error` is due to a missing package of an extra."""
    causes = [error, *([error.__cause__] if error.__cause__ else [])]
    missing = {cause.name for cause in causes if isinstance(cause, ImportError)}
    if isinstance(error, gymnasium.error.NamespaceNotFound) and "ALE" in str(error):
        missing.add("ale_py")
    extra = next((extra for module, extra in EXTRAS.items() if module in missing), None)
    return "" if extra is None else f". It needs the extra [{extra}]: pip install -e '.[{extra}]'"


def solved_at(env: EnvConfig) -> float | None:
    """Return the mean return that counts as solved: the config's, or the id's, or None."""
    if env.solved_at is not None or env.make is not None:
        return env.solved_at
    name = env.id.rpartition(":")[2]  # the module before the colon is imported already
    spec = gymnasium.spec(with_version(name))
    return SOLVED_AT.get(spec.id, spec.reward_threshold)


def register_configs() -> None:
    """Add the groups ``env``, ``collector`` and ``chaos`` to Hydra's ConfigStore, as ``base_<name>``."""
    store_once("env", "base_gym", EnvConfig)
    for name in ("single", "multi_sync", "multi_async", "distributed", "rpc", "ray"):
        store_once("collector", f"base_{name}", type(BUNDLED[name]))
    store_once("chaos", "base_chaos", ChaosConfig)
