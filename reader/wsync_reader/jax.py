"""Weights as JAX pytrees: the parameters of Flax, a module of Equinox, or any other tree."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path, tree_unflatten

from wsync_reader.layout import LayoutMismatch, Weights


def nested(weights: Weights) -> dict[str, Any]:
    """Return ``{"a": {"b": array}}`` for weights called ``"a.b"``; the arrays are JAX's."""
    tree: dict[str, Any] = {}
    for name, array in weights.items():
        *parents, last = name.split(".")
        reduce(lambda place, part: place.setdefault(part, {}), parents, tree)[last] = jnp.asarray(array)
    return tree


def fill(tree: Any, weights: Weights, names: Callable[[str], str | None] = str) -> Any:
    """Return a tree like ``tree`` with the weights in place of its arrays. What is no array stays.

    ``names`` returns the weight's name for a leaf's path (``"params.Dense_0.kernel"``); None if they are the same, as
    in an Equinox module that is built like the trainer's. A ``kernel`` of Flax gets its order of dimensions. Weights
    without a leaf are left out. LayoutMismatch: an array has no weight, or one of another shape or dtype.
    """
    leaves, structure = tree_flatten_with_path(tree)
    filled = list[Any]()
    for path, leaf in leaves:
        if isinstance(leaf, jax.Array | np.ndarray):
            place, like = keystr(path, simple=True, separator="."), leaf
            name = names(place) or place
            if name not in weights:
                raise LayoutMismatch(f"version {weights.version} has no weight '{name}' for '{place}'")
            leaf = jnp.asarray(weights[name])
            if "kernel" in place.split(".")[-2:]:  # (out, in, *spatial) → (*spatial, in, out)
                leaf = leaf.transpose(*range(2, leaf.ndim), 1, 0)
            if (leaf.shape, leaf.dtype) != (like.shape, like.dtype):
                has = f"'{name}' of version {weights.version} is {leaf.dtype}{[*leaf.shape]}"
                raise LayoutMismatch(f"{has}, not {like.dtype}{[*like.shape]} as '{place}'")
        filled.append(leaf)
    return tree_unflatten(structure, filled)
