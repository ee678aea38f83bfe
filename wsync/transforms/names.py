"""What transforms by names have in common; and other names, fewer weights, weights joined or taken apart."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from wsync.errors import LayoutMismatch
from wsync.weights.tensors import require_whole

Memory = dict[str, tuple[list[Any], Tensor]]
"""The results of the last call by name, and of what kind the weights were: new memory costs more than the copy."""


class ByName(ABC):
    """A transform of the library, which is given names or patterns. It keeps nothing of the weights itself.

    Attributes:
        selects: whether the result is a part of the model on purpose.
    """

    selects = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def __call__(
        self, weights: Mapping[str, Tensor], strict: bool = True, memory: Memory | None = None
    ) -> dict[str, Tensor]:
        """Return the transformed weights; LayoutMismatch: the transform does not fit them, or some are sharded.

        Args:
            weights: by name.
            strict: whether they are a whole model, so that a name or a pattern without a weight is an error.
            memory: of an earlier call, whose results are overwritten.
        """
        require_whole(weights, weights.values())  # PyTorch might wait for the other ranks
        with torch.no_grad():
            return self.apply(dict(weights), strict, {} if memory is None else memory)

    @abstractmethod
    def apply(self, weights: dict[str, Tensor], strict: bool, memory: Memory) -> dict[str, Tensor]:
        """Return the transformed weights; ``weights`` may be changed."""


def computed(memory: Memory, name: str, inputs: Sequence[Tensor], compute: Callable[[Tensor | None], Tensor]) -> Tensor:
    """Return ``compute(out)``: the result for ``inputs``, in the memory of the last one of the same kind, if any."""
    kind = [(one.shape, one.dtype, one.device) for one in inputs]
    known = memory.get(name)
    result = compute(known[1] if known is not None and known[0] == kind else None)
    memory[name] = kind, result
    return result


def matching(patterns: Sequence[str], names: Sequence[str], strict: bool, kind: str = "weight") -> set[str]:
    """Return those of ``names`` that match one of ``patterns``; ``kind`` says what they are, for the error.

    With ``strict``, a pattern that matches none is an error, except ``*``.
    """
    found = {pattern: [name for name in names if _matches(name, pattern)] for pattern in patterns}
    unused = [pattern for pattern, some in found.items() if not some and pattern != "*"]
    if unused and strict:
        raise LayoutMismatch(f"no {kind} matches {shown_names(unused)}; there are {shown_names(names)}")
    return set().union(*found.values())


@lru_cache(1 << 16)
def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or (
        "." not in pattern and any(fnmatchcase(component, pattern) for component in name.split("."))
    )


def as_patterns(*given: str | Iterable[str]) -> tuple[str, ...]:
    """Return patterns, given singly or in lists. TypeError: one is no string. ValueError: there is none."""
    found: list[Any] = []
    for one in given:
        found += one if isinstance(one, Iterable) and not isinstance(one, str) else [one]
    wrong = [one for one in found if not isinstance(one, str)]
    if wrong:
        raise TypeError(f"patterns of names are strings, not {wrong[0]!r}")
    if not found:
        raise ValueError("there is no pattern of names: give one or more, such as 'head' or 'layers.0.*'")
    return tuple(found)


def require_distinct(names: Iterable[str]) -> None:
    """Raise ``LayoutMismatch`` if a name is given to two weights."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise LayoutMismatch(f"two weights get the same name: {shown_names(repeated)}")


def shown_names(names: Mapping[str, object] | Sequence[str]) -> str:
    """Return the first names, as text."""
    shown = [f"'{name}'" for name in list(names)[:8]]
    return ", ".join(shown) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _require(names: Iterable[str], weights: Mapping[str, Tensor]) -> None:
    missing = [name for name in names if name not in weights]
    if missing:
        raise LayoutMismatch(f"there is no {shown_names(missing)}; there are {shown_names(weights)}")


class Rename(ByName):
    """Renames weights. An old name that is missing, and a new one that two weights get, are errors.

    Args:
        names: ``{old: new}`` for those that change, or a function of the old name.
    """

    def __init__(self, names: Mapping[str, str] | Callable[[str], str]) -> None:
        self.names = dict(names) if isinstance(names, Mapping) else names

    def apply(self, weights: dict[str, Tensor], strict: bool, memory: Memory) -> dict[str, Tensor]:
        names = self.names
        if strict and not callable(names):
            _require(names, weights)
        new = [names(name) if callable(names) else names.get(name, name) for name in weights]
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
        found = matching(self.patterns, list(weights), strict)
        kept = {name: one for name, one in weights.items() if (name in found) is not self._drops}
        if not kept:
            raise LayoutMismatch(f"none of these weights is left to send: {shown_names(weights)}")
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
        members: list[tuple[str, list[str]]] = []
        for new, old in self.groups.items():
            stems = _stems(weights, old, strict)
            members += [(new.replace("*", stem), [one.replace("*", stem) for one in old]) for stem in stems]
        parts = {one for _, old in members for one in old}
        _require(parts, weights)
        rest = {name: tensor for name, tensor in weights.items() if name not in parts}
        require_distinct([*rest, *(new for new, _ in members)])
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
        result = dict(weights)
        for pattern, parts in self.groups.items():
            for stem in _stems(weights, [pattern], strict):
                name, names = pattern.replace("*", stem), [part.replace("*", stem) for part in parts]
                if result.get(name) is not weights[name]:
                    raise LayoutMismatch(f"two groups match '{name}'")
                views = self._split(name, result.pop(name), len(parts))
                require_distinct([*result, *names])
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
        stars = {name.count("*") for name in (one, *several)}
        if not several or len(stars) > 1 or max(stars) > 1:
            raise ValueError(
                "a group has at least one name, and in all its names one '*', which stands for any text, or in none: "
                f"not {{'{one}': {list(several)}}}"
            )
    return {one: tuple(several) for one, several in groups.items()}


def _stems(weights: Mapping[str, Tensor], patterns: Sequence[str], strict: bool) -> list[str]:
    """Return what the ``*`` of one of ``patterns`` stands for in the names of weights; "" without a ``*``."""
    found = dict[str, None]()
    for pattern in patterns:
        form = re.compile(re.escape(pattern).replace(r"\*", "(.*)"), re.DOTALL)
        found |= {"".join(match.groups()): None for match in map(form.fullmatch, weights) if match}
    if strict and not found:
        raise LayoutMismatch(f"no weight matches {shown_names(patterns)}; there are {shown_names(weights)}")
    return [*found]
