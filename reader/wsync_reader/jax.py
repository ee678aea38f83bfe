"""Weights as JAX pytrees: the parameters of Flax, a module of Equinox, or any other tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        place = tree
        for part in parents:
            place = place.setdefault(part, {})
        place[last] = jnp.asarray(array)
    return tree


def fill(tree: Any, weights: Weights, names: Mapping[str, str] | Callable[[str], str] | None = None) -> Any:
    """Return a tree like ``tree`` with the weights in place of its arrays. What is no array stays.

    ``names``: a leaf's path (``"params.Dense_0.kernel"``) to the weight's name, as a mapping or a function; by default
    they are the same, as in an Equinox module that is built like the trainer's. The dimensions of a ``kernel``, which
    Flax has in another order, are put in it. Weights without a leaf are left out.

    LayoutMismatch: an array has no weight, or one of another shape or dtype.
    """
    find = names if callable(names) else (names or {}).get
    leaves, structure = tree_flatten_with_path(tree)
    filled, problems = list[Any](), list[str]()
    for path, leaf in leaves:
        place = keystr(path, simple=True, separator=".")
        name = find(place) or place
        if isinstance(leaf, jax.Array | np.ndarray) and name not in weights:
            problems.append(f"there is no weight '{name}' for '{place}'")
        elif isinstance(leaf, jax.Array | np.ndarray):
            array = weights[name]
            if "kernel" in place.split(".")[-2:]:  # (out, in, *spatial) → (*spatial, in, out)
                array = array.transpose(*range(2, array.ndim), 1, 0)
            like, leaf = leaf, jnp.asarray(array)
            if (leaf.shape, leaf.dtype) != (like.shape, like.dtype):
                problems.append(f"'{name}' is {leaf.dtype}{[*leaf.shape]}, '{place}' {like.dtype}{[*like.shape]}")
        filled.append(leaf)
    if problems:
        raise LayoutMismatch(f"version {weights.version} does not fit the tree: {'; '.join(problems[:8])}")
    return tree_unflatten(structure, filled)
