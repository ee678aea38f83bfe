"""Steppers that apply a transform's function to the observations or the rewards of another stepper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from collectors.environments.actions import action_codec
from collectors.environments.specs import Spec, SpecTree
from collectors.environments.stepper import Stepper, without_reset_rows
from collectors.environments.vector import Array

Function = Callable[..., Array]
"""Of float32 arrays ``[E, *]``, one row per environment."""


class StepsWrapper:
    """A ``Stepper`` that shares the arrays of an inner one, except for those that it replaces."""

    def __init__(self, inner: Steps) -> None:
        self.inner, self.driver, self.num_envs = inner, inner.driver, inner.num_envs
        self.observation_spec: SpecTree = inner.observation_spec
        self.action_spec = inner.action_spec
        self.observation, self.reward = inner.observation, inner.reward
        self.is_init = inner.is_init
        self.terminated, self.truncated, self.done = inner.terminated, inner.truncated, inner.done
        self.episode_return, self.episode_length = inner.episode_return, inner.episode_length

    @property
    def is_reset(self) -> bool:
        """See Stepper."""
        return self.inner.is_reset

    @property
    def reset_step(self) -> Array | None:
        """See Stepper."""
        return self.inner.reset_step

    @property
    def max_frames_per_traj(self) -> int | None:
        """See Stepper."""
        return self.inner.max_frames_per_traj

    @max_frames_per_traj.setter
    def max_frames_per_traj(self, limit: int | None) -> None:
        self.inner.max_frames_per_traj = limit

    def seed(self, seed: int) -> None:
        """See Stepper."""
        self.inner.seed(seed)

    def reset(self, seed: int | None = None) -> None:
        """See Stepper."""
        self.inner.reset(seed)

    def sample(self) -> tuple[Array, Array]:
        """See Stepper."""
        return self.inner.sample()

    def step(self, action: Array) -> None:
        """See Stepper."""
        self.inner.step(action)

    def reset_ended(self) -> None:
        """See Stepper."""
        self.inner.reset_ended()


Steps = Stepper | StepsWrapper
"""A stepper, with or without transforms around it."""


class EncodedSteps(StepsWrapper):
    """Replaces observations by ``encode(observations)``, also at the end and the start of an episode."""

    def __init__(self, inner: Steps, encode: Function, probe: Function, name: str) -> None:
        """Call ``probe`` once, with the current observation, for the shape.

        Raises:
            ValueError: the result has not one row per environment.
        """
        super().__init__(inner)
        self._encode, self._name = encode, name
        first = probe(inner.observation)
        self._row = first.shape[1:]
        spec = Spec(torch.Size(self._row or (1,)), torch.float32)
        self.observation_spec: SpecTree = spec
        self.observation = np.zeros((self.num_envs, *spec.shape), np.float32)
        self._checked(first, self.num_envs)
        self._is_encoded = False
        if inner.is_reset:
            self._encode_all()
            self._is_encoded = True

    @property
    def is_reset(self) -> bool:
        """See Stepper."""
        return self._is_encoded and self.inner.is_reset

    def reset(self, seed: int | None = None) -> None:
        """See Stepper."""
        self._is_encoded = False
        self.inner.reset(seed)
        self._encode_all()
        self._is_encoded = True

    def step(self, action: Array) -> None:
        """See Stepper."""
        self.inner.step(action)
        self._encode_all()

    def reset_ended(self) -> None:
        """See Stepper."""
        self._is_encoded = False
        self.inner.reset_ended()
        ended = int(np.count_nonzero(self.done))
        if ended:
            self.observation[self.done] = self._checked(self._encode(self.inner.observation[self.done]), ended)
        self._is_encoded = True

    def _encode_all(self) -> None:
        self.observation[...] = self._checked(self._encode(self.inner.observation), self.num_envs)

    def _checked(self, encoded: Array, rows: int) -> Array:
        if encoded.shape != (rows, *self._row):
            message = f"{self._name} gave observations of shape {list(encoded.shape)} for {rows} environment(s)"
            raise ValueError(f"{message}: it has to give one row for each, {[rows, *self._row]}")
        return encoded.reshape(rows, *(self._row or (1,)))


class RewardedSteps(StepsWrapper):
    """Replaces rewards by those of a function; ``episode_return`` stays the sum of the environment's own rewards."""

    def __init__(self, inner: Steps, reward_of: Function, probe: Function, name: str, in_keys: Sequence[Any]) -> None:
        """Call ``probe`` once, with the current arrays, for the shape.

        Raises:
            ValueError: the result has not one number per environment.
        """
        super().__init__(inner)
        self._reward_of, self._name = reward_of, name
        self._actions = action_codec(self.driver.action_space)
        # After the inner step, its array holds the successor, and so does an action that is a view of it: copies.
        self._keeps_observation, self._keeps_action = "observation" in in_keys, "action" in in_keys
        self._acted_on = np.array(inner.observation)
        self._action = self._taken(np.zeros((self.num_envs, *self.action_spec.shape), np.float32))
        self.reward = np.zeros(self.num_envs, np.float32)
        readers: dict[Any, Callable[[], Array]] = {
            "observation": lambda: self._acted_on,
            "action": lambda: self._action,
            ("next", "observation"): lambda: inner.observation,
            ("next", "reward"): lambda: inner.reward[:, None],
        }
        self._readers = [readers[key] for key in in_keys]
        self._checked(probe(*(read() for read in self._readers)))

    def step(self, action: Array) -> None:
        """See Stepper."""
        if self._keeps_observation:
            self._acted_on[...] = self.inner.observation
        if self._keeps_action:
            self._action = self._taken(action)
        self.inner.step(action)
        self.reward[:] = self._checked(self._reward_of(*(read() for read in self._readers)))
        if self.reset_step is not None:
            self.reward[self.reset_step] = 0

    def _taken(self, action: Array) -> Array:
        """Return an action as the environment takes it, float32 ``[E, *action_spec.shape]``; a choice as one-hot."""
        action = without_reset_rows(action, self.done, self.reset_step)
        taken = self._actions.from_env(self._actions.to_env(action, self.num_envs))
        n = self.action_spec.n
        return taken if n is None else np.eye(n, dtype=np.float32)[taken]

    def _checked(self, reward: Array) -> Array:
        if reward.shape not in ((self.num_envs,), (self.num_envs, 1)):
            raise ValueError(
                f"{self._name} gave rewards of shape {list(reward.shape)} for {self.num_envs} environment(s): "
                f"it has to give one number for each, {[self.num_envs]} or {[self.num_envs, 1]}"
            )
        return reward.reshape(self.num_envs)
