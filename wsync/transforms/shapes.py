"""Weights joined, or taken apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from wsync.errors import LayoutMismatch
from wsync.loops.tensors import copy_all
from wsync.transforms.buffers import Buffered
from wsync.transforms.patterns import expand, listing, stem_of


class Fuse(Buffered):
    """Joins weights along a dimension: q, k and v to qkv, gate and up to gate_up.

    Args:
        groups: ``{new: [old, …]}``. A ``*`` in the names stands for the same text in all of them.
        dim: along which they are joined.
    """

    def __init__(self, groups: Mapping[str, Sequence[str]], dim: int = 0) -> None:
        super().__init__()
        self.groups = {new: tuple(old) for new, old in groups.items()}
        self.dim = dim
        self._members: dict[str, tuple[str, ...]] = {}

    def __repr__(self) -> str:
        return f"Fuse({self.groups})"

    def allocate(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See ``Buffered``."""
        self._members = {new: old for new, old in expand(self.groups, weights) if old}
        return {new: torch.cat([weights[one].detach() for one in old], self.dim) for new, old in self._members.items()}

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights, joined ones in the place of their parts.

        Raises:
            LayoutMismatch: a group lacks one of its weights, or matches nothing.
        """
        buffers = self.buffers(weights)
        slices, sources = list[Tensor](), list[Tensor]()
        for new, old in self._members.items():
            sizes = [weights[one].shape[self.dim] for one in old]
            slices += buffers[new].split(sizes, self.dim)
            sources += [weights[one] for one in old]
        copy_all(slices, sources)
        parts = {one for old in self._members.values() for one in old}
        return {**{name: tensor for name, tensor in weights.items() if name not in parts}, **buffers}


class Split:
    """Takes joined weights apart, the opposite of ``Fuse``; copies nothing.

    Args:
        groups: ``{old: [new, …]}``. A ``*`` in the names stands for the same text in all of them.
        sizes: of the parts along ``dim``; by default equal.
        dim: along which they were joined.
    """

    def __init__(self, groups: Mapping[str, Sequence[str]], sizes: Sequence[int] | None = None, dim: int = 0) -> None:
        self.groups = {old: tuple(new) for old, new in groups.items()}
        self.sizes = None if sizes is None else tuple(sizes)
        self.dim = dim

    def __repr__(self) -> str:
        return f"Split({self.groups})"

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights, views of the parts in the place of the joined ones.

        Raises:
            LayoutMismatch: a name matches nothing; or the sizes do not add up.
        """
        result = dict(weights)
        for pattern, news in self.groups.items():
            stems = [stem for name in weights if (stem := stem_of(name, pattern)) is not None]
            if not stems:
                raise LayoutMismatch(f"no weight matches '{pattern}'; there are {listing(weights)}")
            for stem in stems:
                name = pattern.replace("*", stem)
                joined = result.pop(name)
                length = joined.shape[self.dim]
                sizes = self.sizes or (length // len(news),) * len(news)
                if len(sizes) != len(news) or sum(sizes) != length:
                    raise LayoutMismatch(f"'{name}' has {length} along dimension {self.dim}, not {sizes}")
                parts = joined.split(sizes, self.dim)
                result.update({new.replace("*", stem): part for new, part in zip(news, parts, strict=True)})
        return result
