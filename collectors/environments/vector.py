"""Gymnasium's environments behind one interface: a step gives the true successors, and ended rows are reset on request.

Gymnasium calls this ``AutoresetMode.DISABLED``. In its NEXT_STEP mode, the step after the end of an episode resets the
row instead of acting in it; such a row is not a frame, and ``Driver.reset_step`` masks it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, parse_env_id
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space, concatenate

from collectors.environments.actions import action_codec
from collectors.environments.specs import ACTION_MASK, Array, validated

Raw = Any
"""Observations as Gymnasium gives them: an array, or dictionaries and tuples of arrays, each ``[E, *]``."""
Step = tuple[Raw, Any, Any, Any]


class VectorDriver:
    """A vector environment with autoreset disabled: ``reset(options={"reset_mask": …})`` resets rows.

    Attributes:
        num_envs: the number E of its environments, rows of all arrays.
        observation_space, action_space: those of one environment.
        actions: the action space of all environments, for sampling.
        can_truncate: whether a row can be reset before the environment has ended its episode.
        reset_step: bool ``[E]``, the rows that the last step has reset instead of acting in them; None if steps never
            do that.
    """

    env: Any
    can_truncate = True
    reset_step: Array | None = None

    def __init__(self, env: VectorEnv) -> None:
        self.env, self.num_envs = env, env.num_envs
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        self.actions = env.action_space

    def reset(self, seed: int | None) -> Raw:
        """Reset all rows; return observations. Called before the first step and after an error."""
        return validated(self.env.reset(seed=seed)[0], self.env.observation_space)

    def step(self, action: Array) -> Step:
        """Return the true successors, rewards, terminated, truncated. May raise whatever the environment raises."""
        step, is_valid = self.env.step(action), isinstance(self.env, OneByOne)
        return (step if is_valid else validated_step(step, self.env.observation_space, self.num_envs))[:4]

    def reset_rows(self, mask: Array) -> Raw:
        """Reset the rows of ``mask``, which include all ended ones; other rows of the result are undefined.

        Called after each step in which an episode has ended.
        """
        return validated(self.env.reset(options={"reset_mask": mask})[0], self.env.observation_space)

    def close(self) -> None:
        """Close the environments. May be called twice."""
        self.env.close()


class ScalarDriver(VectorDriver):
    """One environment that is not vectorised; observations have no leading dimension."""

    def __init__(self, env: gym.Env) -> None:
        self.env, self.num_envs = Validated(env), 1
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.actions = batch_space(env.action_space, 1)
        self._is_choice = isinstance(env.action_space, spaces.Discrete)

    def step(self, action: Array) -> Step:
        """Step the environment."""
        return self.env.step(action.item() if self._is_choice else action[0])[:4]

    def reset_rows(self, mask: Array) -> Raw:
        """Reset the environment."""
        return self.reset(None)


class NextStepDriver(VectorDriver):
    """A vector environment that resets ended rows in the next step, in which it ignores their actions."""

    can_truncate = False

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env)
        self._ended = self.reset_step = np.zeros(env.num_envs, dtype=np.bool_)
        self._observation: Raw = np.empty(0)

    def reset(self, seed: int | None) -> Raw:
        """Reset all rows; the next step resets none."""
        self._ended = np.zeros_like(self._ended)
        return super().reset(seed)

    def step(self, action: Array) -> Step:
        """Step the environments; those that ended in the step before are reset."""
        self._observation, reward, terminated, truncated = super().step(action)
        self.reset_step, self._ended = self._ended, np.logical_or(terminated, truncated)
        return self._observation, reward, terminated, truncated

    def reset_rows(self, mask: Array) -> Raw:
        """Return the last observations: the next step resets the rows."""
        return self._observation


def validated_step(step: Any, space: spaces.Space, *rows: int) -> tuple[Raw, Any, Any, Any, Any]:
    """Return a step's results, ``[*rows]`` each; raise ValueError if one is no number, or does not fit `space`."""
    observation, *results, info = step
    for i, (name, kinds) in enumerate((("reward", "fiub"), ("terminated", "biu"), ("truncated", "biu"))):
        array = np.asarray(results[i])
        if array.dtype.kind not in kinds or array.size != math.prod(rows):
            what = "number" if i == 0 else "bool"
            raise ValueError(f"the environment's {name} is {results[i]!r}, not one {what} for each environment")
        results[i] = array.reshape(rows)[()]
    return validated(observation, space), *results, info


class Validated(gym.Wrapper):
    """Raises ValueError for observations and results that do not fit; a vector environment would cast them."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self._space = env.observation_space
        self._usual = (self._space.dtype, self._space.shape)

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Reset the environment."""
        observation, info = self.env.reset(**options)
        return validated(observation, self._space), info

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the environment."""
        observation, reward, terminated, truncated, _ = step = self.env.step(action)
        is_usual = type(terminated) is type(truncated) is bool and isinstance(reward, float)
        if is_usual and type(observation) is np.ndarray and (observation.dtype, observation.shape) == self._usual:
            return step  # without a call
        return validated_step(step, self._space)


EnvSource = str | EnvSpec | gym.Env | VectorEnv | Callable[[], gym.Env | VectorEnv]


def make_driver(source: EnvSource, num_envs: int | None, mode: str | None, kwargs: dict[str, Any]) -> VectorDriver:
    """Make the environments of ``source``, or take one that is made; see ``GymEnv`` for the arguments and errors."""
    if isinstance(source, str | EnvSpec):
        return _from_id(source, num_envs or 1, mode, kwargs)
    if kwargs or mode is not None:
        given = ", ".join([*kwargs, *(["vectorization_mode"] if mode is not None else [])])
        raise ValueError(
            f"an environment, or a function that makes one, takes no further arguments ({given}): they are for "
            "environments that are made by their id"
        )
    if isinstance(source, gym.Env | VectorEnv) or not callable(source):
        return _from_made(source, num_envs)
    return _from_made(source(), num_envs) if num_envs in (None, 1) else _one_by_one(source, num_envs)


class OneByOne(SyncVectorEnv):
    """Environments, each a ``Validated``, that are stepped one by one. Their infos are left out: nothing reads them."""

    def step(self, actions: Array) -> Any:
        """Step all; their results are not copied, and the next step overwrites them."""
        seen, rewards, terminated, truncated = self._env_obs, self._rewards, self._terminations, self._truncations
        for i, env in enumerate(self.envs):
            seen[i], rewards[i], terminated[i], truncated[i], _ = env.step(actions[i])
        return concatenate(self.single_observation_space, seen, self._observations), rewards, terminated, truncated, {}


def _one_by_one(make: Callable[[], Any], num_envs: int) -> VectorDriver:
    makers = [partial(_scalar, make)] * num_envs
    return VectorDriver(OneByOne(makers, copy=False, autoreset_mode=AutoresetMode.DISABLED))


def _scalar(make: Callable[[], gym.Env | VectorEnv]) -> gym.Env:
    env = make()
    _check_environment(env)
    if isinstance(env, VectorEnv):
        raise ValueError(f"the function makes {env}, which brings its own num_envs; leave num_envs out")
    return Validated(env)


def _from_id(env_id: str | EnvSpec, num_envs: int, mode: str | None, kwargs: dict[str, Any]) -> VectorDriver:
    if isinstance(env_id, str):
        module, _, env_id = env_id.rpartition(":")  # Gymnasium's "module:Env-v0"
        if module:
            importlib.import_module(module)
        env_id = with_version(env_id)
    if num_envs == 1 and mode in (None, "auto"):
        return ScalarDriver(gym.make(env_id, **kwargs))
    if mode == "auto":
        spec = gym.spec(env_id) if isinstance(env_id, str) else env_id
        native = spec.vector_entry_point is not None and not spec.additional_wrappers and not kwargs
        mode = "vector_entry_point" if native else "sync"
    if mode == "vector_entry_point":
        return _from_made(gym.make_vec(env_id, num_envs, vectorization_mode=mode, **kwargs), num_envs)
    wrappers = kwargs.pop("wrappers", ())
    if mode in (None, "sync"):
        return _one_by_one(partial(build, partial(gym.make, env_id, **kwargs), wrappers), num_envs)
    kwargs |= {"vector_kwargs": {"copy": False, "autoreset_mode": AutoresetMode.DISABLED}}
    kwargs["wrappers"] = [*wrappers, Validated]
    return VectorDriver(gym.make_vec(env_id, num_envs, vectorization_mode=mode, **kwargs))


def with_version(env_id: str) -> str:
    """Return an id of Gymnasium's registry with a version: the newest one, as ``gymnasium.make`` takes it, if none."""
    namespace, name, version = parse_env_id(env_id)
    return env_id if version is not None else get_env_id(namespace, name, find_highest_version(namespace, name))


def _check_environment(env: Any) -> None:
    if not isinstance(env, gym.Env | VectorEnv):
        raise TypeError(
            f"a GymEnv is made from an id, a Gymnasium environment, or a function that makes one, not from a "
            f"{type(env).__name__}"
        )


def _from_made(env: gym.Env | VectorEnv, num_envs: int | None) -> VectorDriver:
    _check_environment(env)
    width = env.num_envs if isinstance(env, VectorEnv) else 1
    if num_envs not in (None, width):
        raise ValueError(f"{env} is {width} environment(s), not num_envs={num_envs}; pass a function that makes one")
    if isinstance(env, gym.Env):
        return ScalarDriver(env)
    mode = env.metadata.get("autoreset_mode")
    if mode is AutoresetMode.DISABLED:
        return VectorDriver(env)
    if mode is AutoresetMode.NEXT_STEP:
        return NextStepDriver(env)
    raise ValueError(f"{env} has autoreset mode {mode}: make it with gymnasium's AutoresetMode.DISABLED or NEXT_STEP")


def refuse_own_statistics(env: Any) -> None:
    """Raise ValueError if a wrapper of `env` normalises by statistics of its own that it still updates."""
    while isinstance(env, gym.Wrapper | VectorWrapper):
        has_some = any(type(one).__name__ == "RunningMeanStd" for one in vars(env).values())
        if has_some and getattr(env, "update_running_mean", True):
            raise ValueError(
                f"{type(env).__name__} has statistics of its own in each environment, which no checkpoint and no other "
                "worker has: leave it out, and let train.py normalise (env.normalize_observations=true, "
                "env.rewards=normalized), or your policy; or set its update_running_mean=False"
            )
        env = env.env


class ActionMask(gym.Wrapper):
    """Moves the action mask from an environment's ``info`` into its observation, where policies read it.

    The observation becomes a Dict: the entries of a Dict observation, or "observation", and "action_mask" (int8, one
    element for each choice of a Discrete action; for a MultiDiscrete one, those of all its choices end to end).

    Args:
        env: puts a mask into the info of each ``reset`` and ``step``: an array, or a tuple of arrays.
        key: the key of the mask in ``info``.

    Raises:
        TypeError: the actions are no choices.
    """

    def __init__(self, env: gym.Env, key: str = ACTION_MASK) -> None:
        super().__init__(env)
        size = sum(action_codec(env.action_space).spec.options)
        if not size:
            raise TypeError(f"an action mask is for Discrete and MultiDiscrete actions, not {env.action_space}")
        self._key, space = key, env.observation_space
        self._nested = isinstance(space, spaces.Dict)
        entries = dict(space.spaces) if isinstance(space, spaces.Dict) else {"observation": space}
        self.observation_space = spaces.Dict(entries | {ACTION_MASK: spaces.MultiBinary(size)})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._with_mask(observation, info), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._with_mask(observation, info), reward, terminated, truncated, info

    def _with_mask(self, observation: Any, info: dict[str, Any]) -> dict[str, Any]:
        if self._key not in info:
            raise ValueError(f"{self.env} has no {self._key!r} in its info, only {sorted(info)}")
        mask = info[self._key]
        flat = np.concatenate([np.ravel(part) for part in mask]) if isinstance(mask, tuple | list) else np.ravel(mask)
        entries = observation if self._nested else {"observation": observation}
        return {**entries, ACTION_MASK: flat.astype(np.int8)}


class PartialObservation(gym.wrappers.TransformObservation):
    """Hides elements of a vector observation, so that a policy has to remember: only `keep` are left.

    Args:
        env: its observations are a Box of one dimension.
        keep: indices of the elements that are left.
    """

    def __init__(self, env: gym.Env, keep: Sequence[int]) -> None:
        space, left = env.observation_space, list(keep)
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise TypeError(f"PartialObservation is for vector observations, not {space}")
        rest = spaces.Box(space.low[left], space.high[left], dtype=space.dtype.type)
        super().__init__(env, lambda observation: observation[left], rest)


def build(make: Callable[[], gym.Env], wrappers: Sequence[Callable[[gym.Env], gym.Env]]) -> gym.Env:
    """Make an environment and put each of `wrappers` around it, the first one innermost."""
    env = make()
    if isinstance(env, gym.vector.VectorEnv):
        raise ValueError(f"{env} is a vector environment: return one environment; num_envs says how many are made")
    for wrapper in wrappers:
        env = wrapper(env)
    return env
