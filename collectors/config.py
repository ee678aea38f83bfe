"""Structured configs of environments and collectors, what is made from them, and which collector carries a scheme."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from typing import Any

import gymnasium
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import MISSING

from collectors.environments.vector import build, refuse_own_statistics, with_version
from collectors.envs import GymEnv
from collectors.errors import ConfigError
from wsync import WeightSyncScheme
from wsync.config import store_once

SOLVED_AT = {"Pendulum-v1": -200.0}
"""Mean returns that count as solved, of environments without a reward threshold in Gymnasium."""

REWARDS = ("raw", "normalized", "sign")
"""The possible values of ``env.rewards``."""


def instantiate_setting(setting: str, config: Any, *args: Any, **options: Any) -> Any:
    """Return ``hydra.utils.instantiate(config, *args, **options)``, with plain lists and dictionaries as arguments.

    Raises:
        ConfigError: there is no such class or function, or it raised an error. The message begins with `setting`; the
            notes are the lines of the user's modules that were being executed.
    """
    if not (isinstance(config, Mapping) and "_convert_" in config):
        options = {"_convert_": "all", **options}
    try:
        return instantiate(config, *args, **options)
    except InstantiationException as error:
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        raise ConfigError(_described(error, setting), first) from error


def _described(error: InstantiationException, setting: str) -> str:
    text, cause = str(error), error.__cause__
    if within := re.search(r"^full_key: (\S+)", text, re.MULTILINE):
        setting += f".{within[1]}"
    if cause is not None and (found := re.match(r"Error in call to target '(?:.+\.)?(.+?)'", text)):
        message = " ".join(str(cause).split()) or repr(cause)
        return f"{setting}: {message if message.startswith(found[1]) else f'{found[1]}: {message}'}"
    if cause is not None and (found := re.match(r"Error locating target '(.+?)'", text)):
        # Hydra's "Error loading …" has the error of the import as its cause; a module's own error comes as it is.
        origin = cause.__cause__ if str(cause).startswith("Error loading ") else cause
        return f"{setting}._target_={found[1]}: {_not_loaded(found[1], origin or cause)}"
    return f"{setting}: {text.splitlines()[0]}"


def _not_loaded(target: str, error: BaseException) -> str:
    if not isinstance(error, ModuleNotFoundError) or not f"{target}.".startswith(f"{error.name}."):
        return f"{type(error).__name__}: {' '.join(str(error).split())}"  # raised by a module
    module, _, name = str(error.name).rpartition(".")
    if not module:
        return f"there is no module '{name}' on sys.path: name its folder by --config-dir, or add it to PYTHONPATH"
    close = get_close_matches(name, dir(sys.modules[module]), n=1)
    return f"module '{module}' has no '{name}'" + (f"; did you mean '{close[0]}'?" if close else "")


# --- environments ---


@dataclass
class EnvConfig:
    """A Gymnasium environment.

    Attributes:
        id: the id, as registered; ``module:id`` imports the module first.
        solved_at: mean return of 100 episodes that counts as solved; None: the known value of the id, if there is one.
        max_episode_steps: steps after which an episode is truncated, if the environment's own limit is not lower.
        kwargs: for ``gymnasium.make``; with `vectorization_mode`, see ``GymEnv``: with `wrappers` or `make` it is sync.
        wrappers: put around each environment, the first one innermost: ``_target_`` and further arguments of each.
        make: instead of `id` and `kwargs`: the ``_target_`` and the arguments of a function that makes an environment.
        normalize_observations: subtract the mean of all observations and divide by their standard deviation.
        rewards: what the learner gets: ``raw``, ``normalized`` (divided by the standard deviation of the discounted
            return) or ``sign``. Reported returns are those of the environment after its `wrappers`.
    """

    id: str = MISSING
    solved_at: float | None = None
    max_episode_steps: int | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    wrappers: list[Any] = field(default_factory=list)
    make: Any = None
    normalize_observations: bool = False
    rewards: str = "raw"


def env_config(env: Any) -> EnvConfig:
    """Return `env` as an EnvConfig; of a plain YAML file, keys that are no settings are arguments of ``_target_``."""
    if isinstance(env, EnvConfig):
        return env
    if not isinstance(env, Mapping) or "_target_" not in env:
        raise ConfigError("env has no _target_: name by it what makes an environment: see docs/environments.md")
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
        make = partial(gymnasium.make, env.id, **to_one)
        if env.make is not None:
            make = instantiate_setting("env", env.make, _partial_=True)
        wrappers = [instantiate_setting(f"env.wrappers[{i}]", x, _partial_=True) for i, x in enumerate(env.wrappers)]
        source, kwargs = partial(build, make, wrappers), {}
    return partial(GymEnv, source, num_envs, max_frames_per_traj=env.max_episode_steps, **kwargs)


def sample(env: EnvConfig, option: str | None = None) -> GymEnv:
    """Make one environment and reset it; for its specs, and so that its errors come before workers are started.

    ``option`` is that of the config group ``env``, for errors; None: the environment was chosen by ``env.id``.

    Raises:
        ConfigError: there is no such environment, a package is missing, it does not take the arguments, or it cannot be
            reset. The notes are the lines of the user's modules that were being executed.
    """
    if env.rewards not in REWARDS:
        raise ConfigError(f"env.rewards={env.rewards}: it is one of {', '.join(REWARDS)}")
    for i, wrapper in enumerate(env.wrappers):
        if "_target_" not in wrapper:
            raise ConfigError(f"env.wrappers[{i}] has no _target_: name the class of the wrapper")
    with ExitStack() as opened:
        try:
            made = env_factory(env, None)()
            opened.callback(made.close)
            refuse_own_statistics(made.stepper.driver.env)
            made.reset()
        except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            detail = " ".join(str(error).split()).rstrip(".?").replace('"gymnasium[mujoco]"', "-e '.[mujoco]'")
            if env.id.startswith("ALE/"):
                detail += "; run `pip install -e '.[atari]'`"
            elif isinstance(error, gymnasium.error.UnregisteredEnv) and ":" not in env.id:
                detail += "; where a module of yours registers it, name that module as well: env.id=module:id"
            chosen = f"env.id={env.id}" if option is None else f"env={option} ({env.id})"
            raise ConfigError(f"{chosen}: {detail}", error) from error
        opened.pop_all()
    return made


def solved_at(env: EnvConfig) -> float | None:
    """Return the mean return that counts as solved: the config's, or the id's, or None."""
    if env.solved_at is not None or env.make is not None:
        return env.solved_at
    name = env.id.rpartition(":")[2]  # the module before the colon is imported already
    spec = gymnasium.spec(with_version(name))
    return SOLVED_AT.get(spec.id, spec.reward_threshold)


# --- collectors ---


@dataclass
class CollectorConfig:
    """The collector in the trainer's process; the numbers of workers, environments and frames are those of the run.

    Attributes:
        init_random_frames: number of first frames with random actions, an equal share for each worker.
        max_staleness: versions that acting weights may be behind the newest ones; batches that are older are dropped.
    """

    _target_: str = "collectors.Collector"
    init_random_frames: int = 0
    max_staleness: int | None = None


@dataclass
class WorkerCollectorConfig(CollectorConfig):
    """Several workers."""

    _target_: str = MISSING
    sync: bool = True
    run_ahead: int | None = None
    cat_results: Any = "stack"  # or a dimension, which is a number
    on_worker_failure: str = "raise"
    worker_timeout: float | None = 600.0
    max_restarts: int = 10


@dataclass
class MultiSyncConfig(WorkerCollectorConfig):
    """Worker processes; a batch has a share of every worker, and all wait for new weights."""

    _target_: str = "collectors.MultiSyncCollector"


@dataclass
class MultiAsyncConfig(WorkerCollectorConfig):
    """Worker processes that collect while the learner learns; a batch is one worker's."""

    _target_: str = "collectors.MultiAsyncCollector"
    sync: bool = False


@dataclass
class RemoteConfig(WorkerCollectorConfig):
    """Workers that take some time to join."""

    timeout: float = 60.0
    _convert_: str = "all"  # the collector gets plain lists and dictionaries


@dataclass
class DistributedConfig(RemoteConfig):
    """Workers that are reached over TCP: processes of this machine, or workers that join."""

    _target_: str = "collectors.distributed.DistributedCollector"
    launcher: str = "local"
    host: str | None = None
    port: int = 0


@dataclass
class RPCConfig(RemoteConfig):
    """Workers that are called by ``torch.distributed.rpc``."""

    _target_: str = "collectors.distributed.RPCCollector"


@dataclass
class RayConfig(RemoteConfig):
    """Ray actors."""

    _target_: str = "collectors.distributed.RayCollector"
    address: str | None = None
    resources: dict[str, Any] = field(default_factory=dict)
    scheduling_strategy: str = "DEFAULT"


BUNDLED: dict[str, CollectorConfig] = {
    "single": CollectorConfig(),
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

    Raises:
        ConfigError: it cannot, or `scheme` is not a WeightSyncScheme.
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
    """Return what distinguishes the bundled collectors; None for a config that is not based on theirs."""
    if not isinstance(collector, CollectorConfig):
        return None
    return collector._target_, getattr(collector, "sync", None)


def register_configs() -> None:
    """Add the groups ``env`` and ``collector`` to Hydra's ConfigStore, as ``base_<name>``."""
    store_once("env", "base_gym", EnvConfig)
    for name in ("single", "multi_sync", "multi_async", "distributed", "rpc", "ray"):
        store_once("collector", f"base_{name}", type(BUNDLED[name]))
