"""The numeric half of an environment: current observations and episode sums as arrays that live as long as it does."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from collectors.environments.specs import Spec, action_codec, observation_codec
from collectors.environments.vector import Array, Driver

_NUMPY = {torch.float32: np.float32, torch.uint8: np.uint8}


class Steps(Protocol):
    """What can be stepped: a ``Stepper``, or one with transforms around it. See there for what each means."""

    driver: Driver
    num_envs: int
    observation_spec: Spec
    action_spec: Spec
    uniform_log_prob: float
    observation: Array
    reward: Array
    terminated: Array
    truncated: Array
    done: Array
    episode_return: Array
    episode_length: Array

    @property
    def is_reset(self) -> bool:
        """Whether it can be stepped as it is; not between the halves of a step, nor after one of them has raised."""
        ...

    @property
    def max_frames_per_traj(self) -> int | None:
        """Steps after which an episode is truncated."""
        ...

    @max_frames_per_traj.setter
    def max_frames_per_traj(self, limit: int | None) -> None: ...

    def seed(self, seed: int) -> None:
        """Make what follows reproducible."""
        ...

    def reset(self, seed: int | None = None) -> None:
        """Begin new episodes in all environments."""
        ...

    def sample(self) -> Array:
        """Return random actions."""
        ...

    def step(self, action: Array) -> None:
        """Apply ``action``; then all results may be read."""
        ...

    def reset_ended(self) -> None:
        """Begin new episodes where ``done``."""
        ...


class Stepper:
    """E environments, stepped in two halves: ``step``, after which all results may be read, then ``reset_ended``.

    All arrays are written in place. After ``step``: ``observation`` ``[E, *obs]`` is the true successor, ``reward``,
    ``terminated``, ``truncated``, ``done``, ``episode_return``, ``episode_length`` (each ``[E]``) belong to this step,
    the last two including it. After ``reset_ended``: ``observation`` is what to act on next.

    Where either half raises, or is interrupted, nobody knows how the episodes stand: ``is_reset`` is false from then
    on, and they have to begin anew.
    """

    def __init__(self, driver: Driver, seed: int | None = None) -> None:
        """Take over ``driver``; the first reset uses ``seed``.

        Raises:
            TypeError: for an observation or action space that cannot be one tensor.
        """
        self.driver = driver
        self.num_envs = driver.num_envs
        self._observations = observation_codec(driver.observation_space)
        self._actions = action_codec(driver.action_space)
        self.observation_spec, self.action_spec = self._observations.spec, self._actions.spec
        self.uniform_log_prob = self._actions.uniform_log_prob
        # The input of a SampledPolicy is a view of this memory: the environment writes straight into it.
        shape = (self.num_envs, *self.observation_spec.shape)
        self.observation = np.zeros(shape, _NUMPY[self.observation_spec.dtype])
        self._started = np.zeros_like(self.observation)
        self.reward = np.zeros(self.num_envs, np.float32)
        self.terminated, self.truncated, self.done = (np.zeros(self.num_envs, np.bool_) for _ in range(3))
        self.episode_return = np.zeros(self.num_envs, np.float64)
        self.episode_length = np.zeros(self.num_envs, np.int64)
        self.is_reset = False
        self._limit: int | None = None
        self._seed: int | None = None
        if seed is not None:
            self.seed(seed)

    @property
    def max_frames_per_traj(self) -> int | None:
        """Steps after which an episode is truncated, whatever the environment says."""
        return self._limit

    @max_frames_per_traj.setter
    def max_frames_per_traj(self, limit: int | None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"max_frames_per_traj is a number of steps, at least 1, not {limit}")
        if limit is not None and not self.driver.can_truncate:
            raise ValueError("this vector environment cannot reset single rows, which max_frames_per_traj needs")
        self._limit = limit

    def seed(self, seed: int) -> None:
        """Make what follows reproducible: the next step is preceded by a reset with ``seed``."""
        self._seed, self.is_reset = seed, False
        # Another stream than the environments', which are seeded with the number itself.
        self.driver.actions.seed(int(np.random.SeedSequence([seed, 1]).generate_state(1)[0]))

    def reset(self, seed: int | None = None) -> None:
        """Begin new episodes in all environments; row i of a vector environment is seeded as Gymnasium does."""
        if seed is not None:
            self.seed(seed)
        self.is_reset = False
        self._observations.write(self.driver.reset(self._seed), self.observation)
        self.episode_return[:] = 0
        self.episode_length[:] = 0
        self._seed, self.is_reset = None, True

    def sample(self) -> Array:
        """Return random actions as a policy would give them: indices ``[E]``, or float32 ``[E, *shape]``."""
        return self._actions.from_env(np.asarray(self.driver.actions.sample()))

    def step(self, action: Array) -> None:
        """Apply ``action`` (any form that a policy may give); see the class for what can be read then.

        Raises:
            ValueError: for actions of a wrong shape, or that there are not (an index out of range, scores of NaN).
        """
        taken = self._actions.to_env(action, self.num_envs)
        self.is_reset = False  # again after the other half
        successor, self.reward[:], self.terminated[:], self.truncated[:] = self.driver.step(taken)
        self._observations.write(successor, self.observation)
        self.episode_return += self.reward
        self.episode_length += 1
        if self._limit is not None:
            self.truncated |= self.episode_length >= self._limit
        np.logical_or(self.terminated, self.truncated, out=self.done)

    def reset_ended(self) -> None:
        """Begin new episodes where ``done``; the other rows go on."""
        if np.count_nonzero(self.done):  # a fifth of the time of any()
            (rows,) = self.done.nonzero()  # a fifth of the time of flatnonzero()
            self._observations.write(self.driver.reset_rows(self.done), self._started)
            self.observation[rows] = self._started[rows]
            self.episode_return[rows] = 0
            self.episode_length[rows] = 0
        self.is_reset = True
