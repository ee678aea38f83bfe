"""Specs of observations and actions as tensors, trees of arrays, and codecs between these and Gymnasium's spaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict

Array = np.ndarray
Observation = Any
"""An array or an ``ArrayTree``, which are used alike."""


class ArrayTree:
    """Arrays with the same leading dimensions, by name in ``parts``; a part may be a tree itself.

    An index is applied to every part: ``tree[t]`` is a tree of views, and ``tree[rows] = other`` writes the parts of
    `other`, a tree with the same names.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = dict(parts)

    def __getitem__(self, index: Any) -> ArrayTree:
        return ArrayTree({name: part[index] for name, part in self.parts.items()})

    def __setitem__(self, index: Any, values: ArrayTree) -> None:
        for name, part in self.parts.items():
            part[index] = values.parts[name]


def validated(observation: Any, space: spaces.Space) -> Any:
    """Return an observation as arrays, in the form of its space; raise ValueError if it does not fit.

    Arrays have the shape of the space and numbers of its kind: to others, numpy would cast them without a word.
    """
    if isinstance(space, spaces.Dict):
        return {key: _part(observation, key, one) for key, one in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_part(observation, i, one) for i, one in enumerate(space.spaces))
    array, dtype = np.asarray(observation), np.dtype(space.dtype)
    if array.shape != space.shape or not (array.dtype == dtype or np.can_cast(array.dtype, dtype, "same_kind")):
        form = f"of shape {list(array.shape)} and dtype {array.dtype}"
        raise ValueError(f"an observation {form} does not fit the environment's space {space}")
    return array


def _part(observation: Any, key: Any, space: spaces.Space) -> Any:
    try:
        return validated(observation[key], space)
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"part {key!r} of the observation: {error or type(error).__name__}") from error


def as_tensors(observation: Observation, *batch_size: int) -> torch.Tensor | TensorDict:
    """Return a tensor, or for a tree a TensorDict of `batch_size`, in the same memory."""
    if isinstance(observation, ArrayTree):
        parts = {name: as_tensors(part, *batch_size) for name, part in observation.parts.items()}
        return TensorDict(parts, batch_size)
    return torch.from_numpy(observation)


ACTION_MASK = "action_mask"
"""The part of an observation that marks the possible choices, one element for each; those at zero are not."""

_NUMPY = {torch.float32: np.float32, torch.uint8: np.uint8}


def to_numpy(value: torch.Tensor) -> Array:
    """Return `value` from any device, without its history; bfloat16, which numpy does not know, as float32."""
    return (value.float() if value.dtype is torch.bfloat16 else value).numpy(force=True)


@dataclass(frozen=True, eq=False)
class Spec:
    """Shape, dtype and bounds of one environment's observation or action (without batch dimensions).

    A discrete action of ``n`` choices has ``n`` set, ``dtype`` int64 (it is stored as an index) and ``shape`` ``(n,)``,
    the number of scores that a network has to give. An action of several choices has ``nvec`` set, the number of
    options of each choice, and is int64 of ``shape`` ``(len(nvec),)``. ``low`` and ``high`` are tensors of ``shape``;
    None of choices, and of an encoder's output.
    """

    shape: torch.Size
    dtype: torch.dtype
    low: torch.Tensor | None = field(default=None, repr=False)
    high: torch.Tensor | None = field(default=None, repr=False)
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


def float_bounds(low: Array, high: Array) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bounds as float32; one beyond its range is infinite."""
    with np.errstate(over="ignore"):
        return torch.tensor(np.asarray(low, np.float32)), torch.tensor(np.asarray(high, np.float32))


class BoxCodec:
    """Box and MultiBinary: the numbers as float32, rounded; uint8 (images) stays uint8."""

    def __init__(self, space: spaces.Box | spaces.MultiBinary) -> None:
        shape = torch.Size(space.shape or (1,))
        image = isinstance(space, spaces.Box) and space.dtype == np.uint8
        dtype = torch.uint8 if image else torch.float32
        bounds = (space.low, space.high) if isinstance(space, spaces.Box) else (0, 1)
        low, high = float_bounds(*(np.broadcast_to(bound, shape) for bound in bounds))
        self.spec = Spec(shape, dtype, low.to(dtype), high.to(dtype))

    def write(self, raw: Array, out: Array) -> None:
        """Write `raw` (``[E, *space.shape]``, E may be missing if 1) into `out` ``[E, *spec.shape]``, in its dtype."""
        out[...] = raw if raw.shape == out.shape else raw.reshape(out.shape)


class OneHotCodec:
    """Discrete and MultiDiscrete: one-hot vectors, end to end (``gymnasium.spaces.flatten``'s convention)."""

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete) -> None:
        self._counts = np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec).astype(np.int64)
        self._starts = np.ravel(space.start)
        self._offsets = np.cumsum(self._counts) - self._counts
        size = torch.Size((int(self._counts.sum()),))
        self.spec = Spec(size, torch.float32, *float_bounds(np.zeros(size), np.ones(size)))

    def write(self, raw: Array, out: Array) -> None:
        """Set one element of ``out`` to 1 for each component; raise ValueError for one outside ``space``."""
        chosen = raw.reshape(len(out), -1) - self._starts
        wrong = (chosen < 0) | (chosen >= self._counts)
        if wrong.any():
            row, i = np.argwhere(wrong)[0]
            low, value = self._starts[i], chosen[row, i] + self._starts[i]
            raise ValueError(f"component {i} is {value}, outside its space, {low} to {low + self._counts[i] - 1}")
        out[...] = 0
        np.put_along_axis(out, chosen + self._offsets, 1, axis=1)


class TreeCodec:
    """Dict and Tuple: a part for each entry, by its key as a string; the entries of a Tuple are called "0", "1", …."""

    def __init__(self, space: spaces.Dict | spaces.Tuple) -> None:
        entries = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        self._codecs: dict[Any, Any] = {key: observation_codec(entry) for key, entry in entries}
        self.spec: SpecTree = {str(key): codec.spec for key, codec in self._codecs.items()}

    def write(self, raw: Any, out: ArrayTree) -> None:
        """Write each entry; raise ValueError for one that does not fit its space, with its name."""
        for key, codec in self._codecs.items():
            try:
                codec.write(raw[key], out.parts[str(key)])
            except ValueError as error:
                raise ValueError(f"part {key!r} of the observation: {error}") from error


ObservationCodec = BoxCodec | OneHotCodec | TreeCodec


def zeros(spec: SpecTree, *batch: int) -> Observation:
    """Return zeros of the shape and dtype of `spec` with the leading dimensions `batch`."""
    if isinstance(spec, Spec):
        return np.zeros((*batch, *spec.shape), _NUMPY[spec.dtype])
    return ArrayTree({name: zeros(part, *batch) for name, part in spec.items()})


def observation_codec(space: spaces.Space) -> ObservationCodec:
    """Return the codec for ``space``; raise TypeError for one without a fixed shape (Text, Graph, Sequence, OneOf)."""
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
