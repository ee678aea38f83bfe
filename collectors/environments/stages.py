"""What transforms make of the observations and rewards of a ``Stepper``."""

from __future__ import annotations

from collections.abc import Callable
from types import EllipsisType
from typing import Any

import numpy as np
import torch

from collectors.environments.actions import ActionCodec
from collectors.environments.specs import Spec, zeros
from collectors.environments.transforms import ACTION, NEXT_OBSERVATION, OBSERVATION, REWARD, Transform
from collectors.environments.trees import Array


class Encoder:
    """Encodes observations, also those at the end and the start of an episode, into ``observation``, of ``spec``."""

    def __init__(self, transform: Transform, source: Array) -> None:
        """Probe ``transform`` with ``source``, the array of the observations that it reads in each step.

        Raises:
            ValueError: the result has not one row per environment.
        """
        self._transform, self._source = transform, source
        first = transform.probe(source)
        self._row = first.shape[1:]
        self.spec = Spec(torch.Size(self._row or (1,)), torch.float32)
        self.observation: Array = zeros(self.spec, len(source))
        self._checked(first, len(source))

    def encode(self, rows: EllipsisType | Array) -> None:
        """Encode these rows of the source; ``...`` for all."""
        given = self._source[rows]
        self.observation[rows] = self._checked(self._transform.evaluate(given), len(given))

    def after(self, reset_step: Array | None) -> None:
        """Encode the successors."""
        self.encode(...)

    def _checked(self, encoded: Array, rows: int) -> Array:
        if encoded.shape != (rows, *self._row):
            message = f"{self._transform} gave observations of shape {list(encoded.shape)} for {rows} environment(s)"
            raise ValueError(f"{message}: it has to give one row for each, {[rows, *self._row]}")
        return encoded.reshape(rows, *self.spec.shape)


class RewardModel:
    """Computes ``reward`` from a step."""

    def __init__(self, transform: Transform, observation: Array, reward: Array, actions: ActionCodec) -> None:
        """Probe ``transform`` with the arrays that it reads in each step, and an action of zeros.

        Raises:
            ValueError: the result has not one number per environment.
        """
        self._transform, self._actions, self._num_envs = transform, actions, len(reward)
        # The arrays themselves: a view of one would be independent of it in a copy or a pickle of the environment.
        self._inputs: dict[Any, Array] = {
            OBSERVATION: observation.copy(),
            NEXT_OBSERVATION: observation,
            REWARD: reward,
        }
        self.reward = np.zeros_like(reward)
        zero = np.zeros((self._num_envs, *actions.spec.shape), np.float32)
        self.before(actions.to_env(zero, self._num_envs))
        self._result(transform.probe)

    def before(self, taken: Array) -> None:
        """Keep the action that the environment takes now, and the observation: the step overwrites its array."""
        if OBSERVATION in self._transform.in_keys:
            self._inputs[OBSERVATION][...] = self._inputs[NEXT_OBSERVATION]
        if ACTION in self._transform.in_keys:
            action, n = self._actions.from_env(taken), self._actions.spec.n
            self._inputs[ACTION] = action if n is None else np.eye(n, dtype=np.float32)[action]

    def after(self, reset_step: Array | None) -> None:
        """Compute the rewards, which are 0 in the rows that the step has reset."""
        self.reward[:] = self._result(self._transform.evaluate)
        if reset_step is not None:
            self.reward[reset_step] = 0

    def _result(self, function: Callable[..., Array]) -> Array:
        inputs = [self._inputs[key] for key in self._transform.in_keys]
        inputs = [one[:, None] if one is self._inputs[REWARD] else one for one in inputs]
        reward = function(*inputs)
        if reward.shape not in ((self._num_envs,), (self._num_envs, 1)):
            raise ValueError(
                f"{self._transform} gave rewards of shape {list(reward.shape)} for {self._num_envs} environment(s): "
                f"it has to give one number for each, {[self._num_envs]} or {[self._num_envs, 1]}"
            )
        return reward.reshape(self._num_envs)
