"""Weights joined, or taken apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from wsync.errors import LayoutMismatch
from wsync.loops.tensors import copy_all, require_whole
from wsync.transforms.buffers import Buffered
from wsync.transforms.patterns import (
    ByName,
    checked_groups,
    expand,
    require_distinct,
    require_unused,
    shown_names,
    stem_of,
)


class Fuse(ByName, Buffered):
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
        self.groups = checked_groups(groups)
        self.dim = dim
        self._members: dict[str, tuple[str, ...]] = {}

    def __repr__(self) -> str:
        return f"Fuse({self.groups})"

    def allocate(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See ``Buffered``."""
        expanded = expand(self.groups, weights, part=self.takes_parts)
        require_distinct([new for new, _ in expanded])
        members = dict(expanded)
        parts = {one for old in members.values() for one in old}
        require_unused((new for new in members if new not in parts), weights)
        joined = {new: self._joined([weights[one].detach() for one in old], old) for new, old in members.items()}
        self._members = members  # not before: weights that are refused leave everything as it was
        return joined

    def _joined(self, parts: Sequence[Tensor], names: Sequence[str]) -> Tensor:
        try:
            return torch.cat(list(parts), self.dim)
        except (RuntimeError, IndexError) as error:
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise LayoutMismatch(
                f"{shown_names(names)} cannot be joined along dimension {self.dim}: their shapes are {shapes}"
            ) from error

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights, joined ones in the place of their parts.

        Raises:
            LayoutMismatch: a group lacks one of its weights, or matches nothing in a whole model; the shapes of its
                weights do not go together; or another weight has the name of the joined one, or is joined to it.
        """
        buffers = self.buffers(weights)
        slices, sources = list[Tensor](), list[Tensor]()
        for new, old in self._members.items():
            sizes = [weights[one].shape[self.dim] for one in old]
            slices += buffers[new].split(sizes, self.dim)
            sources += [weights[one] for one in old]
        if slices:  # a partial update may have none
            copy_all(slices, sources)
        parts = {one for old in self._members.values() for one in old}
        return {**{name: tensor for name, tensor in weights.items() if name not in parts}, **buffers}


class Split(ByName):
    """Takes joined weights apart, the opposite of ``Fuse``; copies nothing.

    Args:
        groups: ``{old: [new, …]}``. A ``*`` in the names stands for the same text in all of them.
        sizes: the sizes of the parts along ``dim``; by default equal.
        dim: along which they were joined.

    Raises:
        ValueError: a group is empty; a name has more than one ``*``; only some names of a group have one; or
            two parts have one name.
    """

    def __init__(self, groups: Mapping[str, Sequence[str]], sizes: Sequence[int] | None = None, dim: int = 0) -> None:
        self.groups = checked_groups(groups)
        for old, new in self.groups.items():
            if len({*new}) < len(new):
                raise ValueError(f"two parts of '{old}' have one name: {shown_names(new)}")
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
        result, whole = dict(weights), set(weights)
        for pattern, parts in self.groups.items():
            stems = [stem for name in weights if (stem := stem_of(name, pattern)) is not None]
            if not (stems or self.takes_parts):
                raise LayoutMismatch(f"no weight matches '{pattern}'; there are {shown_names(weights)}")
            for stem in stems:
                name = pattern.replace("*", stem)
                if name not in whole:
                    raise LayoutMismatch(f"two groups match '{name}'")
                whole.remove(name)
                views = self._split(name, result.pop(name), len(parts))
                names = [part.replace("*", stem) for part in parts]
                require_unused(names, result)
                result.update(zip(names, views, strict=True))
        return result

    def _split(self, name: str, joined: Tensor, count: int) -> Sequence[Tensor]:
        require_whole([name], [joined])  # PyTorch might wait for the other ranks
        if not -joined.dim() <= self.dim < joined.dim():
            raise LayoutMismatch(f"'{name}' has {joined.dim()} dimension(s): it cannot be split along {self.dim}")
        length = joined.shape[self.dim]
        sizes = self.sizes or (length // count,) * count
        if len(sizes) != count or sum(sizes) != length:
            raise LayoutMismatch(
                f"'{name}' has length {length} along dimension {self.dim}, which is not the sum of {count} parts "
                f"of lengths {sizes}"
            )
        return joined.split(sizes, self.dim)
