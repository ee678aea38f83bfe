"""Structured config of an environment, and what is made from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from functools import partial
from importlib.util import find_spec
from typing import Any

import gymnasium
from omegaconf import MISSING

from collectors.environments.vector import with_version
from collectors.environments.wrappers import build
from collectors.envs import GymEnv
from collectors.errors import ConfigError, lines_of_user
from collectors.targets import instantiate_setting

SOLVED_AT = {"Pendulum-v1": -200.0}
"""Mean returns that count as solved, of environments without a reward threshold in Gymnasium."""

REWARDS = ("raw", "normalized", "sign")
"""The possible values of ``env.rewards``."""


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
    """Return `env` as an EnvConfig; of a plain YAML file, keys that are no settings are arguments of ``_target_``."""
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
        make = partial(gymnasium.make, env.id, **to_one)
        if env.make is not None:
            make = instantiate_setting("env", env.make, _partial_=True)
        wrappers = [
            instantiate_setting(f"env.wrappers[{i}]", one, _partial_=True) for i, one in enumerate(env.wrappers)
        ]
        source, kwargs = partial(build, make, wrappers), {}
    return partial(GymEnv, source, num_envs, max_frames_per_traj=env.max_episode_steps, **kwargs)


def sample(env: EnvConfig, option: str | None = None) -> GymEnv:
    """Make one environment and reset it; for its specs, and so that its errors come before workers are started.

    ``option`` is that of the config group ``env``, for errors; None: the environment was chosen by ``env.id``.

    Raises:
        ConfigError: there is no such environment, a package is missing, it does not take the arguments, or it cannot be
            reset. The notes are the lines of the user's modules that were being executed.
    """
    for name in env.kwargs.keys() & _ARGUMENTS_OF_GYM_ENV.keys():
        raise ConfigError(f"env.kwargs.{name} would not reach gymnasium.make: {_ARGUMENTS_OF_GYM_ENV[name]}")
    for i, one in enumerate(env.wrappers):
        if not isinstance(one, Mapping) or "_target_" not in one:
            raise ConfigError(f"env.wrappers[{i}] has no _target_: name the class of the wrapper")
    mode = env.kwargs.get("vectorization_mode")
    if mode not in (None, "auto", "sync") and (env.wrappers or env.make is not None):
        raise ConfigError(
            f"env.kwargs.vectorization_mode={mode}: environments of env.wrappers and env.make are stepped one after "
            "another, which is sync; leave them out, or the mode"
        )
    if env.rewards not in REWARDS:
        raise ConfigError(f"env.rewards={env.rewards}: it is one of {', '.join(REWARDS)}")
    make = env_factory(env, None)
    with ExitStack() as opened:
        try:
            made = make()
            opened.callback(made.close)
            made.reset()
        except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
            detail = " ".join(str(error).split()).rstrip(".?")
            chosen = f"env.id={env.id}" if option is None else f"env={option} ({env.id})"
            refused = ConfigError(f"{chosen}: {detail}{_extra(error)}")
            for line in lines_of_user(error):
                refused.add_note(line)
            raise refused from error
        opened.pop_all()
    return made


def _extra(error: BaseException) -> str:
    """Return what to install, or to import, if `error` is due to a missing package of an extra."""
    causes = [error, *([error.__cause__] if error.__cause__ else [])]
    missing = {cause.name for cause in causes if isinstance(cause, ImportError)}
    if isinstance(error, gymnasium.error.NamespaceNotFound) and "ALE" in str(error):
        if find_spec("ale_py"):
            return ". The module ale_py registers it, and has to be imported: env.id=ale_py:ALE/…"
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
