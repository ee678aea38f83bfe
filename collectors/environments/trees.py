"""Named arrays in a tree: the observations of Dict and Tuple spaces, indexed and assigned like one array."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
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


def map_tree(function: Callable[[Any], Array], tree: Any) -> Any:
    """Apply `function` to each leaf of dictionaries and tuples; the result has the form of `tree`."""
    if isinstance(tree, Mapping):
        return {name: map_tree(function, part) for name, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_tree(function, part) for part in tree)
    return function(tree)


def as_tensors(observation: Observation, *batch_size: int) -> torch.Tensor | TensorDict:
    """Return a tensor, or for a tree a TensorDict of `batch_size`, in the same memory."""
    if isinstance(observation, ArrayTree):
        parts = {name: as_tensors(part, *batch_size) for name, part in observation.parts.items()}
        return TensorDict(parts, batch_size)
    return torch.from_numpy(observation)
