"""The arrays of an environment: current observations, step results and episode sums, written in place."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectors.environments.actions import ActionCodec, action_codec
from collectors.environments.specs import ACTION_MASK, Array, ArrayTree, SpecTree, observation_codec, zeros
from collectors.environments.transforms import ACTION, NEXT_OBSERVATION, OBSERVATION, REWARD, Transform
from collectors.environments.vector import VectorDriver

RESULTS = {
    "reward": np.float32,
    "done": np.bool_,
    "terminated": np.bool_,
    "truncated": np.bool_,
    "episode_return": np.float32,
    "episode_length": np.int64,
}
"""The results of a step, attributes of a ``Stepper`` and keys of a batch, with their dtypes in a batch."""


class Stepper:
    """E environments, stepped in two halves: ``step``, after which the results are read, then ``reset_ended``.

    All arrays are written in place. After ``step``: ``observation`` ``[E, *obs]`` (an ``ArrayTree`` for Dict and Tuple
    spaces) is the true successor; the ``RESULTS`` (each ``[E]``) belong to this step. ``reset_step`` is None, or bool
    ``[E]``: rows that this step has reset instead of acting in them, which are no frames. After ``reset_ended``:
    ``observation`` is what to act on next, and ``is_init`` ``[E]`` says where it is the first of an episode.

    If either half raises or is interrupted, ``is_reset`` is false, and a reset has to follow.
    """

    def __init__(self, driver: VectorDriver, seed: int | None = None) -> None:
        self.driver, self.num_envs = driver, driver.num_envs
        self._observations: Any = observation_codec(driver.observation_space)
        self._actions = action_codec(driver.action_space)
        self.observation_spec: SpecTree = self._observations.spec
        self.action_spec = self._actions.spec
        options = self.action_spec.options
        self._first_options = np.cumsum(options, dtype=np.int64) - options  # of each choice, in an action mask
        # The input of a SampledPolicy is a view of this memory.
        self.observation = zeros(self.observation_spec, self.num_envs)
        self._started = zeros(self.observation_spec, self.num_envs)
        self.is_init = np.ones(self.num_envs, np.bool_)
        self.reward = self._own_reward = np.zeros(self.num_envs, np.float64)
        self.terminated, self.truncated, self.done = (np.zeros(self.num_envs, np.bool_) for _ in range(3))
        self.episode_return = np.zeros(self.num_envs, np.float64)
        self.episode_length, self._one = np.repeat([[0], [1]], self.num_envs, 1)  # adding a plain 1 takes longer
        self.reset_step = driver.reset_step
        self.is_reset = False  # whether `step` may be called without a `reset`
        self._limit: int | None = None
        self._seed: int | None = None
        self._rewards: list[RewardModel] = []
        if seed is not None:
            self.seed(seed)

    def append(self, transform: Transform) -> None:
        """Replace ``reward`` by what ``transform`` makes of it, after the existing transforms."""
        self._rewards.append(RewardModel(transform, self.observation, self.reward, self._actions))
        self.reward = self._rewards[-1].reward

    def limit(self, frames: int | None) -> None:
        """Truncate episodes after so many steps, if nothing else ends them earlier; None: no limit by this call."""
        if frames is None:
            return
        if frames < 1:
            raise ValueError(f"max_frames_per_traj is a number of steps, at least 1, not {frames}")
        if not self.driver.can_truncate:
            raise ValueError(
                "this vector environment cannot reset single rows, which max_frames_per_traj needs: make it with "
                'vectorization_mode="sync"'
            )
        self._limit = min(frames, self._limit or frames)

    def seed(self, seed: int) -> None:
        """Seed the random actions, and a reset that precedes the next step."""
        seed = operator.index(seed)  # Gymnasium takes no integers of numpy
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
        self.done[:] = False
        self.is_init[:] = True
        self._seed = None
        self.is_reset = True

    def sample(self) -> tuple[Array, Array]:
        """Return random actions as a policy would give them: indices ``[E]`` or ``[E, k]``, or float32 ``[E, *shape]``.

        With them, their log-probabilities ``[E]``, in nats. Where observations have an "action_mask" with an element
        for each option, only options that it allows are drawn.
        """
        actions, mask = self.driver.actions, self._mask()
        if mask is None:
            return self._actions.draw(actions)
        indices, log_prob = sample_allowed(self.action_spec.options, mask, actions.np_random)
        return (indices[:, 0] if self.action_spec.is_discrete else indices), log_prob

    def _mask(self) -> Array | None:
        """Return the action mask of the current observations, bool ``[E, sum(options)]``; None if they have none."""
        options, observation = self.action_spec.options, self.observation
        mask = observation.parts.get(ACTION_MASK) if isinstance(observation, ArrayTree) else None
        if isinstance(mask, Array) and options and mask.shape == (self.num_envs, sum(options)):
            return mask != 0
        return None

    def step(self, action: Array) -> None:
        """Apply ``action`` (any form that a policy may give); see the class for what can be read then."""
        self._check_mask()
        taken = self._actions.to_env(action, self.num_envs)
        for model in self._rewards:
            model.before(taken)
        self.is_reset = False  # until `reset_ended`
        successor, self._own_reward[:], self.terminated[:], self.truncated[:] = self.driver.step(taken)
        self._observations.write(successor, self.observation)
        self.episode_return += self._own_reward
        self.episode_length += self._one
        self.reset_step = self.driver.reset_step
        if self.reset_step is not None:
            for sums in (self._own_reward, self.episode_return, self.episode_length):
                sums[self.reset_step] = 0
        if self._limit is not None:
            self.truncated |= self.episode_length >= self._limit
        np.logical_or(self.terminated, self.truncated, out=self.done)
        for model in self._rewards:
            model.after(self.reset_step)

    def _check_mask(self) -> None:
        """Raise ValueError if an environment that acts now has no option of a choice."""
        mask = self._mask()
        if mask is None:
            return
        possible = np.logical_or.reduceat(mask, self._first_options, axis=1).all(1)
        if self.reset_step is not None:
            possible |= self.done  # the driver resets these rows now
        if not possible.all():
            row = int(possible.argmin())
            raise ValueError(
                f'the "{ACTION_MASK}" of environment {row} of this worker allows no action in step '
                f"{self.episode_length[row]} of its episode (0 is the first): at least one option of each choice has "
                "to be possible until the episode ends"
            )

    def reset_ended(self) -> None:
        """Start new episodes where ``done``; the other rows continue."""
        if np.count_nonzero(self.done):
            (rows,) = self.done.nonzero()
            self._observations.write(self.driver.reset_rows(self.done), self._started)
            self.observation[rows] = self._started[rows]
            self.episode_return[rows] = 0
            self.episode_length[rows] = 0
        self.is_init[:] = self.done
        if self.reset_step is not None:
            self.is_init |= self.reset_step
        self.is_reset = True


class RewardModel:
    """Computes ``reward`` from a step."""

    def __init__(self, transform: Transform, observation: Array, reward: Array, actions: ActionCodec) -> None:
        self._transform, self._actions, self._num_envs = transform, actions, len(reward)
        # The arrays themselves: a view of one would be independent of it in a copy or a pickle of the environment.
        self._inputs: dict[Any, Array] = {NEXT_OBSERVATION: observation, REWARD: reward}
        self._inputs[OBSERVATION] = observation.copy()
        self.reward = np.zeros_like(reward)

    def before(self, taken: Array) -> None:
        """Keep the action that the environment takes now, and the observation: the step overwrites its array."""
        if OBSERVATION in self._transform.in_keys:
            self._inputs[OBSERVATION][...] = self._inputs[NEXT_OBSERVATION]
        if ACTION in self._transform.in_keys:
            action, n = self._actions.from_env(taken), self._actions.spec.n
            self._inputs[ACTION] = action if n is None else np.eye(n, dtype=np.float32)[action]

    def after(self, reset_step: Array | None) -> None:
        """Compute the rewards, which are 0 in the rows that the step has reset."""
        inputs = [self._inputs[key] for key in self._transform.in_keys]
        reward = self._transform.evaluate(*(one[:, None] if one is self._inputs[REWARD] else one for one in inputs))
        if reward.shape not in ((self._num_envs,), (self._num_envs, 1)):
            raise ValueError(
                f"{self._transform} gave rewards of shape {list(reward.shape)} for {self._num_envs} environment(s): "
                f"it has to give one number for each, {[self._num_envs]} or {[self._num_envs, 1]}"
            )
        self.reward[:] = reward.reshape(self._num_envs)
        if reset_step is not None:
            self.reward[reset_step] = 0


def sample_allowed(options: Sequence[int], allowed: Array, generator: np.random.Generator) -> tuple[Array, Array]:
    """Draw one option of each choice, uniformly from those that are allowed; from all of them where none is.

    Returns:
        Indices ``[E, k]``, and the log-probabilities ``[E]`` of these draws, in nats.
    """
    indices, log_prob = [], np.zeros(len(allowed))
    for part in np.split(allowed, np.cumsum(options)[:-1], axis=1):
        possible = part | ~part.any(1, keepdims=True)
        indices.append(np.where(possible, generator.random(part.shape), -1.0).argmax(1))
        log_prob -= np.log(possible.sum(1))
    return np.stack(indices, 1), log_prob
