"""Finding the tensors in TensorDicts and state dicts that list the same keys as one before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor


class Listing:
    """The keys of a TensorDict (nested or flat) or of a mapping, in their order, and the places of a layout's tensors.

    It keeps no tensor. Reading another object of the same type and keys costs a comparison per level.

    Args:
        level: the keys.
        order: for each name of the layout, the index of its tensor among those that ``level`` lists.
    """

    def __init__(self, level: Level, order: Sequence[int]) -> None:
        self._level = level
        self._order = tuple(order)

    @classmethod
    def of(cls, source: object, names: Sequence[str]) -> Listing | None:
        """Return the listing of ``source``; None unless it lists exactly the tensors called ``names``."""
        level = _level(source, "")
        if level is None or sorted(level.names) != sorted(names):
            return None
        place = {name: index for index, name in enumerate(level.names)}
        return cls(level, [place[name] for name in names])

    def find(self, given: object) -> list[Tensor] | None:
        """Return the tensors of ``given`` in the order of the layout; None if its type or its keys differ."""
        found: list[Any] = []
        return [found[i] for i in self._order] if self._level.read(given, found) else None

    def takes(self, given: object) -> bool:
        """See ``TensorFinder``."""
        return self._level.read(given, [])


class Level:
    """One level of a nested TensorDict or mapping.

    Args:
        kind: the type of the object.
        keys: in their order.
        nested: ``(index of a key, its level)``, by index.
        prefix: the prefix of the names of this level.
    """

    def __init__(self, kind: type, keys: tuple[Any, ...], nested: Sequence[tuple[int, Level]], prefix: str) -> None:
        self._kind = kind
        self._is_dict = kind in (dict, OrderedDict)
        self._keys = keys
        self._nested = tuple(nested)
        self._prefix = prefix

    @property
    def names(self) -> list[str]:
        """The dotted names of all tensors, in the order in which ``read`` finds them."""
        below = dict(self._nested)
        found: list[str] = []
        for index, key in enumerate(self._keys):
            name = ".".join(key) if isinstance(key, tuple) else str(key)
            found += below[index].names if index in below else [self._prefix + name]
        return found

    def read(self, given: Any, found: list[Any]) -> bool:
        """Append the tensors of ``given`` to ``found``; False if its type or its keys differ."""
        if type(given) is not self._kind:
            return False
        listed = given if self._is_dict else dict(_items(given))
        if tuple(listed) != self._keys:
            return False
        values = listed.values()
        if not self._nested:
            found += values
            return True
        values, begin = tuple(values), 0
        for index, level in self._nested:
            found += values[begin:index]
            if not level.read(values[index], found):
                return False
            begin = index + 1
        found += values[begin:]
        return True


def _items(source: Any) -> Any:
    """The entries of one level; all leaves at once where a TensorDict is not a plain one."""
    if type(source) is TensorDict or not isinstance(source, TensorDictBase):
        return source.items()
    return source.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)


def _level(source: object, prefix: str) -> Level | None:
    """Return the levels of ``source``; None if it, or a value in it, is neither a TensorDict nor a mapping."""
    if not isinstance(source, TensorDictBase | Mapping):
        return None
    pairs = list(_items(source))
    nested: list[tuple[int, Level]] = []
    for index, (key, value) in enumerate(pairs):
        if isinstance(value, TensorDictBase | Mapping):
            level = _level(value, f"{prefix}{key}.")
            if level is None:
                return None
            nested.append((index, level))
    return Level(type(source), tuple(key for key, _ in pairs), nested, prefix)
