"""Other names, fewer weights, weights joined or taken apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from wsync.errors import LayoutMismatch
from wsync.transforms.chain import ByName, as_patterns, require, require_distinct, require_unused, shown_names
from wsync.weights.tensors import require_whole


class Rename(ByName):
    """Renames weights.

    Args:
        names: ``{old: new}`` for those that change, or a function of the old name.
    """

    def __init__(self, names: Mapping[str, str] | Callable[[str], str]) -> None:
        super().__init__()
        self.names = dict(names) if isinstance(names, Mapping) else names

    def __repr__(self) -> str:
        return f"Rename({self.names!r})"

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``weights`` under their new names.

        Raises:
            LayoutMismatch: an old name is missing (from a whole model); or two weights get one name.
        """
        names = self.names
        if callable(names):
            new = [names(name) for name in weights]
        else:
            if not self.takes_parts:
                require(names, weights)
            new = [names.get(name, name) for name in weights]
        require_distinct(new)
        return dict(zip(new, weights.values(), strict=True))


class _Filter(ByName):
    """A transform that keeps a part of the weights, chosen by patterns of names."""

    selects = True
    _keeps_matching: ClassVar[bool]
    _kept: ClassVar = {"_names": [], "_matching": frozenset()}  # names of the last weights, and those that match

    def __init__(self, *patterns: str | Sequence[str]) -> None:
        super().__init__()
        self.patterns = as_patterns(*patterns)

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights that are kept.

        Raises:
            LayoutMismatch: there are none; or a pattern matches none of the first weights, which are a whole model.
        """
        names = list(weights)
        if names != self._names:  # they are matched once for weights with the same names
            # Later weights may lack what is dropped: a state dict has no non-persistent buffers.
            self._matching = self.matching(self.patterns, names, strict=not self._names)
            self._names = names
        kept = {name: one for name, one in weights.items() if (name in self._matching) is self._keeps_matching}
        if not kept:
            if self._keeps_matching:
                raise LayoutMismatch(f"no weight matches; there are {shown_names(weights)}")
            raise LayoutMismatch("every weight matches, so none is left to send")
        return kept

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.patterns))})"


class Select(_Filter):
    """Keeps the weights whose names match one of the patterns (strings, or lists of them).

    The receiving model keeps its own values of all others, and its own extra state (``get_extra_state``).
    """

    _keeps_matching = True


class Exclude(_Filter):
    """Drops the weights whose names match one of the patterns (strings, or lists of them).

    The receiving model keeps its own values of them, or lacks them. It keeps its own extra state
    (``get_extra_state``), too.
    """

    _keeps_matching = False


class Fuse(ByName):
    """Joins weights along a dimension: q, k and v to qkv, gate and up to gate_up.

    The joined weight is a new one: it is tied to no other, also where its parts are.

    Args:
        groups: ``{new: [old, …]}``. A ``*`` in the names stands for the same text in all of them.
        dim: along which they are joined.

    Raises:
        ValueError: a group is empty; a name has more than one ``*``; or only some names of a group have one.
    """

    def __init__(self, groups: Mapping[str, Sequence[str]], dim: int = 0) -> None:
        super().__init__()
        self.groups = _checked_groups(groups)
        self.dim = dim
        self._members: dict[str, tuple[str, ...]] = {}

    def __repr__(self) -> str:
        return f"Fuse({self.groups})"

    def allocate(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the joined weights."""
        expanded: list[tuple[str, tuple[str, ...]]] = []
        for new, old in self.groups.items():
            stems = _stems(self, weights, old)
            expanded += [(new.replace("*", stem), tuple(one.replace("*", stem) for one in old)) for stem in stems]
        members, parts = dict(expanded), {one for _, old in expanded for one in old}
        require(parts, weights)
        require_distinct([new for new, _ in expanded])
        require_unused((new for new in members if new not in parts), weights)
        joined: dict[str, Tensor] = {}
        for new, old in members.items():
            tensors = [weights[one].detach() for one in old]
            try:
                joined[new] = torch.cat(tensors, self.dim)
            except (RuntimeError, IndexError) as error:
                shapes = ", ".join(str(list(one.shape)) for one in tensors)
                raise LayoutMismatch(
                    f"{shown_names(old)} cannot be joined along dimension {self.dim}: their shapes are {shapes}"
                ) from error
        self._members = members  # not before: weights that are refused leave everything as it was
        return joined

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights, joined ones in the place of their parts.

        Raises:
            LayoutMismatch: a group lacks a weight, or matches nothing in a whole model; the shapes of its weights do
                not go together; or another weight has the name of the joined one.
        """
        buffers = self.buffers(weights)
        with torch.no_grad():
            for new, old in self._members.items():
                torch.cat([weights[one] for one in old], self.dim, out=buffers[new])
        parts = {one for old in self._members.values() for one in old}
        return {**{name: tensor for name, tensor in weights.items() if name not in parts}, **buffers}


class Split(ByName):
    """Takes joined weights apart, the opposite of ``Fuse``; copies nothing.

    Args:
        groups: ``{old: [new, …]}``. A ``*`` in the names stands for the same text in all of them.
        sizes: the sizes of the parts along ``dim``; by default equal.
        dim: along which they were joined.

    Raises:
        ValueError: a group is empty; a name has more than one ``*``; or only some names of a group have one.
    """

    def __init__(self, groups: Mapping[str, Sequence[str]], sizes: Sequence[int] | None = None, dim: int = 0) -> None:
        super().__init__()
        self.groups = _checked_groups(groups)
        self.sizes = None if sizes is None else tuple(sizes)
        self.dim = dim

    def __repr__(self) -> str:
        return f"Split({self.groups})"

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights, views of the parts in the place of the joined ones.

        Raises:
            LayoutMismatch: a name matches nothing in a whole model, or a weight matches two; the sizes do not add up;
                or another weight has the name of a part.
        """
        result = dict(weights)
        for pattern, parts in self.groups.items():
            for stem in _stems(self, weights, [pattern]):
                name, names = pattern.replace("*", stem), [part.replace("*", stem) for part in parts]
                if result.get(name) is not weights[name]:
                    raise LayoutMismatch(f"two groups match '{name}'")
                views = self._split(name, result.pop(name), len(parts))
                require_distinct(names)
                require_unused(names, result)
                result.update(zip(names, views, strict=True))
        return result

    def _split(self, name: str, joined: Tensor, count: int) -> Sequence[Tensor]:
        require_whole([name], [joined])  # PyTorch might wait for the other ranks
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


def _stems(one: ByName, weights: Mapping[str, Tensor], patterns: Sequence[str]) -> list[str]:
    """Return what the ``*`` of one of ``patterns`` stands for in the names of weights."""
    found = dict.fromkeys(stem for name in weights for each in patterns if (stem := _stem_of(name, each)) is not None)
    if not (found or one.takes_parts):
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
