"""Codecs of actions, between tensors and Gymnasium's spaces.

A codec has ``spec``, the Spec of one environment's action, and three functions. ``to_env`` makes Gymnasium's actions
``[E, *]`` of what a policy gives; ``from_env`` is its inverse. ``draw`` returns random actions from the space of all
environments, as a policy would give them, with their log-probabilities ``[E]`` in nats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from gymnasium import spaces

from collectors.environments.specs import Array, Spec, float_bounds


def _has_rows(action: Array, num_envs: int) -> bool:
    """Whether `action` has one row for each environment; the action of one environment needs no row."""
    return num_envs == 1 or len(action) == num_envs


def _checked(index: Array, options: Sequence[int]) -> Array:
    """Return indices ``[E, k]`` as a copy, int64; raise ValueError for one that is no index of its choice."""
    finite = index if index.dtype.kind != "f" else np.nan_to_num(index, nan=-1, posinf=-1, neginf=-1)
    taken = finite.astype(np.int64)  # a copy: an environment may keep it
    wrong = (taken != index) | (taken < 0) | (taken >= options)
    if np.count_nonzero(wrong):
        row, choice = np.argwhere(wrong)[0]
        which = f"choice {choice} of the action" if len(options) > 1 else "the action"
        last = options[choice] - 1
        raise ValueError(f"{which} for environment {row} is {index[row, choice]}, and an index is 0 to {last}")
    return taken


class DiscreteActions:
    """A choice among n: an index ``[E]``, or scores or one-hot ``[E, n]`` of which the greatest counts."""

    def __init__(self, space: spaces.Discrete) -> None:
        self.n, self.start = int(space.n), int(space.start)
        self.spec = Spec(torch.Size((self.n,)), torch.int64, n=self.n)

    def to_env(self, action: Array, num_envs: int) -> Array:
        """Return int64 ``[E]``; raise ValueError for another shape, an index out of range, or scores of NaN."""
        if action.size == num_envs * self.n and action.shape[-1:] == (self.n,):
            scores = action.reshape(num_envs, self.n)
            if scores.dtype.kind == "f" and (unknown := np.isnan(scores)).any():
                row = int(unknown.any(-1).argmax())
                values = scores[row].tolist()
                raise ValueError(f"the scores of actions 0 to {self.n - 1} for environment {row} are {values}")
            taken = scores.argmax(-1)
        elif action.size == num_envs and _has_rows(action, num_envs):
            taken = _checked(action.reshape(num_envs, 1), (self.n,))[:, 0]
        else:
            raise ValueError(
                f"an action for {num_envs} environment(s) with {self.n} choices is an index [{num_envs}] or "
                f"scores [{num_envs}, {self.n}], not {list(action.shape)}"
            )
        return taken + self.start

    def from_env(self, action: Array) -> Array:
        """Return indices, counted from 0."""
        return action.astype(np.int64) - self.start

    def draw(self, actions: spaces.Space) -> tuple[Array, Array]:
        """Return random indices ``[E]``, and their log-probabilities."""
        drawn = self.from_env(np.asarray(actions.sample()))
        return drawn, np.full(len(drawn), -math.log(self.n))


class BoxActions:
    """A vector; on the way to the environment it is clipped to the bounds, and rounded for a space of integers."""

    def __init__(self, space: spaces.Box) -> None:
        self.space = space
        self._is_integer = space.dtype.kind != "f"  # or bool
        # A space of integers has no infinite bounds itself.
        low = np.where(space.bounded_below, space.low, -np.inf)
        high = np.where(space.bounded_above, space.high, np.inf)
        self.spec = Spec(torch.Size(space.shape), torch.float32, *float_bounds(low, high))
        self._low, self._high = space.low, space.high
        if self._is_integer:  # float64 rounds the largest int64 and uint64 up, out of the range of the dtype
            self._low, self._high = space.low.astype(np.float64), space.high.astype(np.float64)
            if space.dtype.kind in "iu":
                self._high = np.minimum(self._high, np.nextafter(float(np.iinfo(str(space.dtype)).max), 0))

    def to_env(self, action: Array, num_envs: int) -> Array:
        """Return ``[E, *shape]`` in the space's dtype; raise ValueError for any other shape, or NaN."""
        shape = (num_envs, *self.space.shape)
        if action.shape != shape and (action.size != math.prod(shape) or not _has_rows(action, num_envs)):
            raise ValueError(f"an action for these environments has shape {list(shape)}, not {list(action.shape)}")
        clipped = np.minimum(np.maximum(action.reshape(shape), self._low), self._high)
        if np.count_nonzero(unknown := np.isnan(clipped)):
            row = int(np.argwhere(unknown)[0, 0])
            raise ValueError(f"the action for environment {row} is {clipped[row].tolist()}")
        return (np.rint(clipped) if self._is_integer else clipped).astype(self.space.dtype, copy=False)

    def from_env(self, action: Array) -> Array:
        """Return float32."""
        return action.astype(np.float32)

    def draw(self, actions: spaces.Space) -> tuple[Array, Array]:
        """Return random actions, float32 ``[E, *shape]``, and their log-densities.

        Gymnasium draws each element by itself: between two bounds uniformly; with one bound, at an exponential distance
        of mean 1 from it; without bounds, from the standard normal distribution.
        """
        space = self.space
        below, above = space.bounded_below, space.bounded_above
        if self._is_integer and not space.is_bounded():
            raise ValueError(
                f"no random actions can be drawn from {space}, integers without bounds: give the space bounds, or let "
                "a policy act from the first frame (init_random_frames=0)"
            )
        drawn = np.asarray(actions.sample())
        value, low, high = (one.astype(np.float64) for one in (drawn, space.low, space.high))
        width = np.where(below & above, high - low + self._is_integer, 1.0)
        uniform = -np.log(np.where(width > 0, width, 1.0))  # equal bounds leave one value
        exponential = -np.where(below, value - low, high - value)
        normal = -0.5 * (value**2 + np.log(2 * np.pi))
        each = np.where(below & above, uniform, np.where(below | above, exponential, normal))
        return self.from_env(drawn), each.reshape(len(drawn), -1).sum(1)


class MultiDiscreteActions:
    """Several choices at once, int64 indices ``[E, k]``; a MultiBinary action is k choices between 0 and 1."""

    def __init__(self, space: spaces.MultiDiscrete | spaces.MultiBinary) -> None:
        self.space = space
        binary = isinstance(space, spaces.MultiBinary)
        self.nvec = np.full(space.shape, 2).ravel() if binary else space.nvec.ravel().astype(np.int64)
        self._start = 0 if binary else space.start.ravel()
        self.spec = Spec(torch.Size(self.nvec.shape), torch.int64, nvec=tuple(self.nvec.tolist()))

    def to_env(self, action: Array, num_envs: int) -> Array:
        """Return ``[E, *space.shape]`` in the space's dtype; raise ValueError for a wrong shape or index."""
        shape = [num_envs, len(self.nvec)]
        if action.size != math.prod(shape) or not _has_rows(action, num_envs):
            raise ValueError(f"an action for these environments is indices {shape}, not {list(action.shape)}")
        taken = _checked(action.reshape(shape), self.spec.options) + self._start
        return taken.astype(self.space.dtype).reshape(num_envs, *self.space.shape)

    def from_env(self, action: Array) -> Array:
        """Return indices ``[E, k]``, counted from 0."""
        return action.reshape(len(action), -1).astype(np.int64) - self._start

    def draw(self, actions: spaces.Space) -> tuple[Array, Array]:
        """Return random indices ``[E, k]``, and their log-probabilities."""
        drawn = self.from_env(np.asarray(actions.sample()))
        return drawn, np.full(len(drawn), -float(np.log(self.nvec).sum()))


ActionCodec = DiscreteActions | MultiDiscreteActions | BoxActions


def action_codec(space: spaces.Space) -> ActionCodec:
    """Return the codec for ``space``; raise TypeError for a Dict, Tuple or any other space."""
    if isinstance(space, spaces.Discrete):
        return DiscreteActions(space)
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        return MultiDiscreteActions(space)
    if isinstance(space, spaces.Box):
        return BoxActions(space)
    raise TypeError(
        f"GymEnv takes Discrete, MultiDiscrete, MultiBinary and Box actions, not {space}: wrap the environment to have "
        "one of these"
    )
