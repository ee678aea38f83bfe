"""Gymnasium wrappers that Gymnasium does not have, and the making of an environment with wrappers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from collectors.environments.specs import ACTION_MASK


class ActionMask(gym.Wrapper):
    """Moves the action mask from an environment's ``info`` into its observation, where policies read it.

    The observation becomes a Dict: the entries of a Dict observation, or "observation", and "action_mask" (int8, one
    element for each choice of a Discrete action; for a MultiDiscrete one, those of all its choices end to end).

    Args:
        env: puts a mask into the info of each ``reset`` and ``step``: an array, or a tuple of arrays.
        key: the key of the mask in ``info``.

    Raises:
        TypeError: the actions are neither Discrete nor MultiDiscrete.
    """

    def __init__(self, env: gym.Env, key: str = ACTION_MASK) -> None:
        super().__init__(env)
        if isinstance(env.action_space, spaces.Discrete):
            size = int(env.action_space.n)
        elif isinstance(env.action_space, spaces.MultiDiscrete):
            size = int(env.action_space.nvec.sum())
        else:
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


class PartialObservation(gym.ObservationWrapper):
    """Hides elements of a vector observation, so that a policy has to remember: only `keep` are left.

    Args:
        env: its observations are a Box of one dimension.
        keep: indices of the elements that are left.
    """

    def __init__(self, env: gym.Env, keep: Sequence[int]) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise TypeError(f"PartialObservation is for vector observations, not {space}")
        self._keep = list(keep)
        self.observation_space = spaces.Box(space.low[self._keep], space.high[self._keep], dtype=space.dtype.type)

    def observation(self, observation: Any) -> Any:
        """Return the elements that are left."""
        return observation[self._keep]


def build(make: Callable[[], gym.Env], wrappers: Sequence[Callable[[gym.Env], gym.Env]]) -> gym.Env:
    """Make an environment and put each of `wrappers` around it, the first one innermost."""
    env = make()
    if isinstance(env, gym.vector.VectorEnv):
        raise ValueError(f"{env} is a vector environment: return one environment; num_envs says how many are made")
    for wrapper in wrappers:
        env = wrapper(env)
    return env
