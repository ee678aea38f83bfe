"""Other names, fewer weights, weights joined or taken apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from wsync.errors import LayoutMismatch
from wsync.transforms.chain import (
    ByName,
    Memory,
    as_patterns,
    computed,
    matching,
    require,
    require_distinct,
    require_unused,
    shown_names,
)


class Rename(ByName):
    """Renames weights. An old name that is missing, and a new one that two weights get, are errors.

    Args:
        names: ``{old: new}`` for those that change, or a function of the old name.
    """

    def __init__(self, names: Mapping[str, str] | Callable[[str], str]) -> None:
        self.names = dict(names) if isinstance(names, Mapping) else names

    def apply(self, weights: dict[str, Tensor], strict: bool, memory: Memory) -> dict[str, Tensor]:
        """Return ``weights`` under their new names."""
        names = self.names
        if callable(names):
            new = [names(name) for name in weights]
        else:
            if strict:
                require(names, weights)
            new = [names.get(name, name) for name in weights]
        require_distinct(new)
        return dict(zip(new, weights.values(), strict=True))


class Select(ByName):
    """Keeps the weights whose names match one of the patterns (strings, or lists of them).

    The receiving model keeps its own values of all others, and its own extra state (``get_extra_state``).
    """

    selects = True
    _drops: ClassVar[bool] = False  # what matches

    def __init__(self, *patterns: str | Sequence[str]) -> None:
        self.patterns = as_patterns(*patterns)

    def apply(self, weights: dict[str, Tensor], strict: bool, memory: Memory) -> dict[str, Tensor]:
        """Return the weights that are kept; LayoutMismatch: there are none."""
        found = matching(self.patterns, weights, strict)
        kept = {name: one for name, one in weights.items() if (name in found) is not self._drops}
        if not kept:
            raise LayoutMismatch(
                "every weight matches, so none is left to send"
                if self._drops
                else f"no weight matches; there are {shown_names(weights)}"
            )
        return kept


class Exclude(Select):
    """Drops the weights whose names match one of the patterns (strings, or lists of them).

    The receiving model keeps its own values of them, or lacks them. It keeps its own extra state, too.
    """

    _drops = True


class Fuse(ByName):
    """Joins weights along a dimension: q, k and v to qkv, gate and up to gate_up.

    The joined weight is a new one: it is tied to no other, also where its parts are. A group that lacks some of its
    weights, shapes that do not go together, and another weight with the new name are errors.

    Args:
        groups: ``{new: [old, …]}``. A ``*`` in the names stands for the same text in all of them.
        dim: along which they are joined.

    Raises:
        ValueError: a group is empty; a name has more than one ``*``; or only some names of a group have one.
    """

    def __init__(self, groups: Mapping[str, Sequence[str]], dim: int = 0) -> None:
        self.groups = _checked_groups(groups)
        self.dim = dim

    def apply(self, weights: dict[str, Tensor], strict: bool, memory: Memory) -> dict[str, Tensor]:
        """Return the weights, joined ones in the place of their parts."""
        members: list[tuple[str, list[str]]] = []
        for new, old in self.groups.items():
            stems = _stems(weights, old, strict)
            members += [(new.replace("*", stem), [one.replace("*", stem) for one in old]) for stem in stems]
        parts = {one for _, old in members for one in old}
        require(parts, weights)
        rest = {name: tensor for name, tensor in weights.items() if name not in parts}
        require_distinct([new for new, _ in members])
        require_unused([new for new, _ in members], rest)
        return {**rest, **{new: self._joined(new, [weights[one] for one in old], memory) for new, old in members}}

    def _joined(self, name: str, parts: list[Tensor], memory: Memory) -> Tensor:
        try:
            return computed(memory, name, parts, lambda out: torch.cat(parts, self.dim, out=out))
        except (RuntimeError, IndexError) as error:
            shapes = ", ".join(str(list(one.shape)) for one in parts)
            raise LayoutMismatch(
                f"'{name}' cannot be joined along dimension {self.dim}: the shapes of its parts are {shapes}"
            ) from error


class Split(ByName):
    """Takes joined weights apart, the opposite of ``Fuse``; copies nothing.

    Sizes that do not add up, a weight that two groups match, and another weight with the name of a part are errors.

    Args:
        groups: ``{old: [new, …]}``. A ``*`` in the names stands for the same text in all of them.
        sizes: the sizes of the parts along ``dim``; by default equal.
        dim: along which they were joined.

    Raises:
        ValueError: as in ``Fuse``.
    """

    def __init__(self, groups: Mapping[str, Sequence[str]], sizes: Sequence[int] | None = None, dim: int = 0) -> None:
        self.groups = _checked_groups(groups)
        self.sizes = None if sizes is None else tuple(sizes)
        self.dim = dim

    def apply(self, weights: dict[str, Tensor], strict: bool, memory: Memory) -> dict[str, Tensor]:
        """Return the weights, views of the parts in the place of the joined ones."""
        result = dict(weights)
        for pattern, parts in self.groups.items():
            for stem in _stems(weights, [pattern], strict):
                name, names = pattern.replace("*", stem), [part.replace("*", stem) for part in parts]
                if result.get(name) is not weights[name]:
                    raise LayoutMismatch(f"two groups match '{name}'")
                views = self._split(name, result.pop(name), len(parts))
                require_distinct(names)
                require_unused(names, result)
                result.update(zip(names, views, strict=True))
        return result

    def _split(self, name: str, joined: Tensor, count: int) -> Sequence[Tensor]:
        length = joined.shape[self.dim] if -joined.dim() <= self.dim < joined.dim() else 0
        sizes = self.sizes or (length // count,) * count
        if not length or len(sizes) != count or sum(sizes) != length:
            raise LayoutMismatch(
                f"'{name}' has length {length} along dimension {self.dim}, which is not the sum of {count} parts "
                f"of lengths {sizes}"
            )
        return joined.split(sizes, self.dim)


def _checked_groups(groups: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    for one, several in groups.items():
        if not several:
            raise ValueError(f"the group of '{one}' is empty; it has at least one name")
        stars = {name.count("*") for name in (one, *several)}
        if len(stars) > 1 or max(stars) > 1:
            shown = shown_names((one, *several))
            raise ValueError(f"in a group all names have one '*', which stands for any text, or none has: not {shown}")
    return {one: tuple(several) for one, several in groups.items()}


def _stems(weights: Mapping[str, Tensor], patterns: Sequence[str], strict: bool) -> list[str]:
    """Return what the ``*`` of one of ``patterns`` stands for in the names of weights."""
    found = dict.fromkeys(stem for name in weights for each in patterns if (stem := _stem_of(name, each)) is not None)
    if strict and not found:
        raise LayoutMismatch(f"no weight matches {shown_names(patterns)}; there are {shown_names(weights)}")
    return [*found]


def _stem_of(name: str, pattern: str) -> str | None:
    """Return what the ``*`` of ``pattern`` stands for in ``name``; None if it does not match."""
    before, star, after = pattern.partition("*")
    if not star:
        return "" if name == pattern else None
    if len(name) < len(before) + len(after) or not (name.startswith(before) and name.endswith(after)):
        return None
    return name[len(before) : len(name) - len(after)]
