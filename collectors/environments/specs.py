"""Specs of observations and actions as tensors, and codecs between them and Gymnasium's spaces."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium import spaces

from collectors.environments.trees import Array, ArrayTree, Observation

ACTION_MASK = "action_mask"
"""The part of an observation that tells which choices are possible, one element for each; those at zero are not."""

_NUMPY = {torch.float32: np.float32, torch.uint8: np.uint8}


def to_numpy(value: torch.Tensor) -> Array:
    """Return `value` from any device, without its history; bfloat16, which numpy does not know, as float32."""
    return (value.float() if value.dtype is torch.bfloat16 else value).numpy(force=True)


@dataclass(frozen=True, eq=False)
class Spec:
    """Shape, dtype and bounds of one environment's observation or action (without batch dimensions).

    A discrete action of ``n`` choices has ``n`` set, ``dtype`` int64 (it is stored as an index) and ``shape`` ``(n,)``,
    the number of scores that a network has to give. Otherwise ``n`` is None.
    An action of several choices has ``nvec`` set, the number of options of each choice, and is int64 of ``shape``
    ``(len(nvec),)``. Otherwise ``nvec`` is None.
    ``low`` and ``high`` are tensors of ``shape``, or None for a discrete action.
    """

    shape: torch.Size
    dtype: torch.dtype
    low: torch.Tensor | None = None
    high: torch.Tensor | None = None
    n: int | None = None
    nvec: tuple[int, ...] | None = None

    @property
    def is_discrete(self) -> bool:
        """Whether this is a choice among ``n``."""
        return self.n is not None

    @property
    def options(self) -> tuple[int, ...]:
        """The number of options of each choice of an action; empty for a continuous one."""
        return self.nvec or (() if self.n is None else (self.n,))


SpecTree = Spec | Mapping[str, "SpecTree"]
"""The spec of an observation: of one tensor, or of several by name, for a Dict or Tuple space."""


class ObservationCodec(Protocol):
    """Writes Gymnasium's batched observations into float32 (or uint8) arrays."""

    @property
    def spec(self) -> SpecTree:
        """The spec of one environment's observation."""
        ...

    def write(self, raw: Any, out: Any) -> None:
        """Write ``raw`` ``[E, *space.shape]`` into ``out`` ``[E, *spec.shape]``; for a tree, each part."""


class BoxCodec:
    """Box and MultiBinary: the same numbers as float32; uint8 (images) stays uint8."""

    def __init__(self, space: spaces.Box | spaces.MultiBinary) -> None:
        """Take shape and bounds from ``space``."""
        shape = torch.Size(space.shape or (1,))
        image = isinstance(space, spaces.Box) and space.dtype == np.uint8
        dtype = torch.uint8 if image else torch.float32
        low, high = (space.low, space.high) if isinstance(space, spaces.Box) else (0, 1)
        with np.errstate(over="ignore"):  # a float64 bound beyond float32 is infinite there
            low, high = (torch.tensor(np.broadcast_to(bound, shape).astype(np.float32)) for bound in (low, high))
        self.spec = Spec(shape, dtype, low.to(dtype), high.to(dtype))

    def write(self, raw: Array, out: Array) -> None:
        """Cast and copy."""
        out[...] = raw if raw.shape == out.shape else raw.reshape(out.shape)


class OneHotCodec:
    """Discrete and MultiDiscrete: one-hot vectors, end to end (``gymnasium.spaces.flatten``'s convention)."""

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete) -> None:
        """Lay the one-hot vectors of all components of ``space`` end to end."""
        counts = np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec).astype(np.int64)
        self._offsets = np.cumsum(counts) - counts - np.ravel(space.start)
        size = torch.Size((int(counts.sum()),))
        self.spec = Spec(size, torch.float32, torch.zeros(size), torch.ones(size))

    def write(self, raw: Array, out: Array) -> None:
        """Set one element of ``out`` to 1 for each component."""
        out[...] = 0
        np.put_along_axis(out, raw.reshape(len(out), -1) + self._offsets, 1, axis=1)


class TreeCodec:
    """Dict and Tuple: a part for each entry, by its key as a string; the entries of a Tuple are called "0", "1", …."""

    def __init__(self, space: spaces.Dict | spaces.Tuple) -> None:
        """Make a codec for each entry of ``space``.

        Raises:
            TypeError: an entry has no codec.
        """
        entries = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        self._codecs = {key: observation_codec(entry) for key, entry in entries}
        self.spec: SpecTree = {str(key): codec.spec for key, codec in self._codecs.items()}

    def write(self, raw: Any, out: ArrayTree) -> None:
        """Write each entry."""
        for key, codec in self._codecs.items():
            codec.write(raw[key], out.parts[str(key)])


def zeros(spec: SpecTree, *batch: int) -> Observation:
    """Return zeros of the shape and dtype of `spec` with the leading dimensions `batch`."""
    if isinstance(spec, Spec):
        return np.zeros((*batch, *spec.shape), _NUMPY[spec.dtype])
    return ArrayTree({name: zeros(part, *batch) for name, part in spec.items()})


def observation_codec(space: spaces.Space) -> ObservationCodec:
    """Return the codec for ``space``.

    Raises:
        TypeError: for a space that is not made of tensors of a fixed shape (Text, Graph, Sequence, OneOf).
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return TreeCodec(space)
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return BoxCodec(space)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return OneHotCodec(space)
    raise TypeError(
        f"GymEnv gives observations as tensors of a fixed shape, and {type(space).__name__} has none: "
        f"wrap the environment in gymnasium.wrappers.TransformObservation. The space: {space}"
    )


def _has_rows(action: Array, num_envs: int) -> bool:
    """Whether `action` has one row for each environment; the action of one environment needs no row."""
    return num_envs == 1 or len(action) == num_envs


class DiscreteActions:
    """A choice among n: an index ``[E]``, or scores or one-hot ``[E, n]`` of which the greatest counts.

    ``uniform_log_prob`` is that of a random action, in nats.
    """

    def __init__(self, space: spaces.Discrete) -> None:
        """Take ``n`` and the first value from ``space``."""
        self.n, self.start = int(space.n), int(space.start)
        self.spec = Spec(torch.Size((self.n,)), torch.int64, n=self.n)
        self.uniform_log_prob = -math.log(self.n)

    def to_env(self, action: Array, num_envs: int) -> Array:
        """Return the environment's own numbers, int64 ``[E]``.

        Raises:
            ValueError: another shape, an index out of range, or scores of NaN.
        """
        if action.size == num_envs * self.n and action.shape[-1:] == (self.n,):
            taken = self._greatest(action.reshape(num_envs, self.n))
        elif action.size == num_envs and _has_rows(action, num_envs):
            taken = self._known(action.reshape(num_envs))
        else:
            raise ValueError(
                f"an action for {num_envs} environment(s) with {self.n} choices is an index [{num_envs}] or "
                f"scores [{num_envs}, {self.n}], not {list(action.shape)}"
            )
        if self.start:
            taken += self.start
        return taken

    def _known(self, index: Array) -> Array:
        """Return a checked copy: an environment may keep it. The first two branches are the common cases."""
        if index.size == 1 and index.item() in range(self.n):
            return index.astype(np.int64)
        with suppress(ValueError, TypeError):  # an index is out of range, or not an integer
            return np.unravel_index(index, (self.n,))[0]  # checks and copies in one call
        known = np.isin(index, np.arange(self.n))
        if not known.all():
            row = int(known.argmin())
            raise ValueError(f"the action for environment {row} is {index[row]}, and an index is 0 to {self.n - 1}")
        return index.astype(np.int64)

    def _greatest(self, scores: Array) -> Array:
        if scores.dtype.kind == "f" and (unknown := np.isnan(scores)).any():
            row = int(unknown.any(-1).argmax())
            values = scores[row].tolist()
            raise ValueError(f"the scores of actions 0 to {self.n - 1} for environment {row} are {values}")
        return scores.argmax(-1)

    def from_env(self, action: Array) -> Array:
        """Return indices, counted from 0."""
        return action.astype(np.int64) - self.start


class BoxActions:
    """A vector; values out of bounds are clipped before they reach the environment.

    ``uniform_log_prob`` is the log-density of a random action, in nats; NaN where the bounds are infinite.
    """

    def __init__(self, space: spaces.Box) -> None:
        """Take shape, bounds and dtype from ``space``."""
        self.space = space
        low, high = (torch.tensor(np.asarray(bound, dtype=np.float32)) for bound in (space.low, space.high))
        self.spec = Spec(torch.Size(space.shape), torch.float32, low, high)
        log_volume = (high - low).log().sum().item()
        self.uniform_log_prob = -log_volume if space.is_bounded() else math.nan
        self._bounds = (np.empty(0), np.empty(0))  # for all environments, [E, *shape]: no broadcast in each step

    def to_env(self, action: Array, num_envs: int) -> Array:
        """Return ``[E, *shape]`` in the space's dtype, clipped; raise ValueError for any other shape, or NaN."""
        low, high = self._bounds
        if len(low) != num_envs:
            shape, space = (num_envs, *self.space.shape), self.space
            low, high = self._bounds = tuple(np.full(shape, bound, space.dtype) for bound in (space.low, space.high))
        if action.size != low.size or not _has_rows(action, num_envs):
            raise ValueError(f"an action for these environments has shape {list(low.shape)}, not {list(action.shape)}")
        clipped = np.maximum(action.reshape(low.shape), low)
        if (unknown := np.isnan(clipped)).any():
            row = int(np.argwhere(unknown)[0, 0])
            raise ValueError(f"the action for environment {row} is {clipped[row].tolist()}")
        np.minimum(clipped, high, out=clipped)
        return clipped.astype(self.space.dtype, copy=False)

    def from_env(self, action: Array) -> Array:
        """Return float32."""
        return action.astype(np.float32)


class MultiDiscreteActions:
    """Several choices at once, int64 indices ``[E, k]``; a MultiBinary action is k choices between 0 and 1.

    ``uniform_log_prob`` is that of a random action, in nats.
    """

    def __init__(self, space: spaces.MultiDiscrete | spaces.MultiBinary) -> None:
        """Take the number of options of each choice, and its first value, from ``space``."""
        self.space = space
        binary = isinstance(space, spaces.MultiBinary)
        self.nvec = np.full(space.shape, 2).ravel() if binary else space.nvec.ravel().astype(np.int64)
        self._start = 0 if binary else space.start.ravel()
        self.spec = Spec(torch.Size(self.nvec.shape), torch.int64, nvec=tuple(self.nvec.tolist()))
        self.uniform_log_prob = -float(np.log(self.nvec).sum())

    def to_env(self, action: Array, num_envs: int) -> Array:
        """Return the environment's own numbers, ``[E, *space.shape]`` in the space's dtype.

        Raises:
            ValueError: another shape, or an index out of range.
        """
        if action.size != num_envs * len(self.nvec) or not _has_rows(action, num_envs):
            shape = [num_envs, len(self.nvec)]
            raise ValueError(f"an action for these environments is indices {shape}, not {list(action.shape)}")
        indices = action.reshape(num_envs, len(self.nvec))
        wrong = ~((indices >= 0) & (indices < self.nvec))  # true for NaN as well
        if wrong.any():
            row, choice = np.argwhere(wrong)[0]
            raise ValueError(
                f"choice {choice} of the action for environment {row} is {indices[row, choice]}, and an index is "
                f"0 to {self.nvec[choice] - 1}"
            )
        return (indices + self._start).astype(self.space.dtype).reshape(num_envs, *self.space.shape)

    def from_env(self, action: Array) -> Array:
        """Return indices ``[E, k]``, counted from 0."""
        return action.reshape(len(action), -1).astype(np.int64) - self._start


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
