"""Finding the tensors of a module again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

Place = tuple[dict[str, Any], str]
"""A dictionary of a module, and a key in it."""
Link = tuple[dict[str, Any], str, Any]
"""The place of a child module, and the child."""


class TensorTree:
    """Finds the tensors of a module, as long as nothing but tensors was replaced in it.

    Args:
        places: the place of each tensor to be found, in the order in which they are returned.
        links: a link to each child module.
        vacant: places that hold None, and must.
        tables: every dictionary of the tree, to which nothing may be added and from which nothing may be removed.
    """

    def __init__(
        self,
        places: tuple[Place, ...],
        links: tuple[Link, ...],
        vacant: tuple[Place, ...],
        tables: tuple[Mapping[str, Any], ...],
        /,
    ) -> None:
        self._places = places
        self._links = links
        self._vacant = vacant
        self._tables = [(table, len(table)) for table in tables]

    def tensors(self) -> list[Tensor] | None:
        """Return the tensors at the places, as they are now; None if the tree has changed."""
        if (
            any(len(table) != size for table, size in self._tables)
            or any(where.get(key) is not child for where, key, child in self._links)
            or any(key not in where or where[key] is not None for where, key in self._vacant)
        ):
            return None
        tensors = [where.get(key) for where, key in self._places]
        found = [tensor for tensor in tensors if tensor is not None]
        return found if len(found) == len(tensors) else None
