"""Gymnasium's environments behind one face: step tells the true successor, and ended rows are reset when asked.

Gymnasium calls this ``AutoresetMode.DISABLED``. Its usual NEXT_STEP mode adds a row per episode in which nobody acted.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from collectors.environments.native_cartpole import MaskResetCartPole, is_native, native_settings, takes

Array = np.ndarray
Step = tuple[Array, Any, Any, Any]


class Driver(Protocol):
    """E environments as arrays with a leading dimension E."""

    num_envs: int
    observation_space: spaces.Space  # of one environment
    action_space: spaces.Space  # of one environment
    actions: spaces.Space  # of all, for sampling
    can_truncate: bool  # whether a row that the environment has not ended can be reset

    def reset(self, seed: int | None) -> Array:
        """Reset all; return observations."""
        ...

    def step(self, action: Array) -> Step:
        """Return the true successors, rewards, terminated, truncated. Nothing is reset."""
        ...

    def reset_rows(self, mask: Array) -> Array:
        """Reset the rows of ``mask``, all ended ones among them; of the observations returned only these rows count."""
        ...

    def close(self) -> None:
        """Close the environments."""
        ...


class ScalarDriver:
    """One plain environment: several times faster than a vector environment of one."""

    num_envs = 1
    can_truncate = True

    def __init__(self, env: gym.Env) -> None:
        """Drive ``env``."""
        self.env = env
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.actions = batch_space(env.action_space, 1)
        self._scalar_action = isinstance(env.action_space, spaces.Discrete)

    def reset(self, seed: int | None) -> Array:
        """See Driver."""
        return np.asarray(self.env.reset(seed=seed)[0])[None]

    def step(self, action: Array) -> Step:
        """See Driver."""
        one = action.item() if self._scalar_action else action[0]
        observation, reward, terminated, truncated, _ = self.env.step(one)
        return np.asarray(observation)[None], reward, terminated, truncated

    def reset_rows(self, mask: Array) -> Array:
        """See Driver."""
        return self.reset(None)

    def close(self) -> None:
        """See Driver."""
        self.env.close()


class VectorDriver:
    """A vector environment that resets rows by ``options={"reset_mask": …}`` (autoreset disabled)."""

    can_truncate = True

    def __init__(self, env: VectorEnv) -> None:
        """Drive ``env``."""
        self.env, self.num_envs = env, env.num_envs
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        self.actions = env.action_space

    def reset(self, seed: int | None) -> Array:
        """See Driver."""
        return self.env.reset(seed=seed)[0]

    def step(self, action: Array) -> Step:
        """See Driver."""
        return self.env.step(action)[:4]

    def reset_rows(self, mask: Array) -> Array:
        """See Driver."""
        return self.env.reset(options={"reset_mask": mask})[0]

    def close(self) -> None:
        """See Driver."""
        self.env.close()


class SameStepDriver(VectorDriver):
    """A vector environment, made elsewhere, that resets ended rows within ``step`` and gives their last observation."""

    def __init__(self, env: VectorEnv) -> None:
        """Drive ``env``."""
        super().__init__(env)
        self.can_truncate = isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv)
        self._started: Array = np.empty(0)
        self._ended = np.zeros(env.num_envs, dtype=np.bool_)

    def step(self, action: Array) -> Step:
        """See Driver."""
        self._started, reward, terminated, truncated, info = self.env.step(action)
        self._ended = np.logical_or(terminated, truncated)
        successor = self._started.copy()
        if self._ended.any() and "final_obs" not in info:
            raise ValueError(f'{self.env} says that it resets in the same step, and gives no info["final_obs"]')
        for row in np.flatnonzero(self._ended):
            successor[row] = info["final_obs"][row]
        return successor, reward, terminated, truncated

    def reset_rows(self, mask: Array) -> Array:
        """See Driver."""
        others = mask & ~self._ended
        if others.any():
            started = super().reset_rows(others)
            self._started[others] = started[others]
        return self._started


EnvSource = str | EnvSpec | gym.Env | VectorEnv | Callable[[], gym.Env | VectorEnv]


def make_driver(source: EnvSource, num_envs: int | None, mode: str | None, kwargs: dict[str, Any]) -> Driver:
    """Make, or take, the environments of ``source``; see ``GymEnv`` for the arguments and the errors."""
    if isinstance(source, str | EnvSpec):
        return _from_id(source, num_envs or 1, mode, kwargs)
    if kwargs or mode is not None:
        raise ValueError(f"an environment that is made already takes no further arguments: {kwargs or mode}")
    if isinstance(source, gym.Env | VectorEnv):
        return _from_made(source, num_envs)
    if num_envs is None or num_envs == 1:
        return _from_made(source(), num_envs)
    return VectorDriver(SyncVectorEnv([_scalar(source)] * num_envs, copy=False, autoreset_mode=AutoresetMode.DISABLED))


def _scalar(make: Callable[[], gym.Env | VectorEnv]) -> Callable[[], gym.Env]:
    def checked() -> gym.Env:
        env = make()
        if isinstance(env, VectorEnv):
            raise ValueError(f"the function makes {env}, which brings its own num_envs; leave num_envs out")
        return env

    return checked


def _from_id(env_id: str | EnvSpec, num_envs: int, mode: str | None, kwargs: dict[str, Any]) -> Driver:
    if isinstance(env_id, str):
        module, _, env_id = env_id.rpartition(":")  # Gymnasium's "module:Env-v0"
        if module:
            importlib.import_module(module)
    spec = gym.spec(env_id) if isinstance(env_id, str) else env_id
    if num_envs == 1 and mode is None:
        return ScalarDriver(gym.make(env_id, **kwargs))
    native = is_native(spec)
    if mode == "vector_entry_point" and not native:
        raise ValueError(f"{spec.id} has no native vector environment whose rows can be reset when they end")
    if native and mode in (None, "vector_entry_point"):
        settings = native_settings(spec, kwargs)
        if mode is not None or takes(settings):  # else a scalar one may know them, or says that it does not
            return VectorDriver(MaskResetCartPole(num_envs, **settings))
    if spec.entry_point is None:
        raise ValueError(
            f"{spec.id} exists only as a vector environment that resets in the step after an episode's end, "
            "which gives frames that no policy acted in; GymEnv needs a scalar version of it"
        )
    vector_kwargs = {"copy": False, "autoreset_mode": AutoresetMode.DISABLED}  # GymEnv copies before the next step
    return VectorDriver(
        gym.make_vec(env_id, num_envs, vectorization_mode=mode or "sync", vector_kwargs=vector_kwargs, **kwargs)
    )


def _from_made(env: gym.Env | VectorEnv, num_envs: int | None) -> Driver:
    width = env.num_envs if isinstance(env, VectorEnv) else 1
    if num_envs not in (None, width):
        raise ValueError(f"{env} is {width} environment(s), not num_envs={num_envs}; pass a function that makes one")
    if isinstance(env, gym.Env):
        return ScalarDriver(env)
    autoreset = env.metadata.get("autoreset_mode")
    if autoreset == AutoresetMode.DISABLED:
        return VectorDriver(env)
    if autoreset == AutoresetMode.SAME_STEP:
        return SameStepDriver(env)
    raise ValueError(
        f"{env} has autoreset mode {autoreset}: after an episode's end it gives a frame that no policy acted in. "
        "Make it with autoreset_mode=AutoresetMode.SAME_STEP, or hand GymEnv the id"
    )
