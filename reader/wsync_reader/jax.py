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

    ``names``: the weight for a leaf's path (``"params.Dense_0.kernel"``), in a mapping or by a function; by default it
    has the path for its name, as in an Equinox module that is built like the trainer's. A leaf called ``kernel``, of
    Flax, has the dimensions of the trainer's weight in another order, and gets them so. Weights without a leaf are left
    out.

    LayoutMismatch: an array has no weight, or one of another shape or dtype.
    """
    find = names if callable(names) else (names or {}).get
    leaves, structure = tree_flatten_with_path(tree)
    filled, problems = list[Any](), list[str]()
    for path, leaf in leaves:
        if not isinstance(leaf, jax.Array | np.ndarray):
            filled.append(leaf)
            continue
        place = keystr(path, simple=True, separator=".")
        name = find(place) or place
        array = weights.get(name)
        if array is None:
            problems.append(f"there is no weight '{name}' for '{place}'")
            continue
        if "kernel" in place.split(".")[-2:]:  # (out, in, *spatial) → (*spatial, in, out)
            array = array.transpose(*range(2, array.ndim), 1, 0)
        filled.append(made := jnp.asarray(array))
        if (made.shape, made.dtype) != (leaf.shape, leaf.dtype):
            problems.append(f"'{name}' is {made.dtype}{[*made.shape]}, '{place}' {leaf.dtype}{[*leaf.shape]}")
    if problems:
        raise LayoutMismatch(f"version {weights.version} does not fit the tree: {'; '.join(problems[:8])}")
    return tree_unflatten(structure, filled)
