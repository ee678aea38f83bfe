"""Several transforms, one after the other, and what the single ones have in common: patterns of names, and buffers."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor

from wsync.errors import LayoutMismatch
from wsync.transforms.delta import Delta
from wsync.weights.tensors import require_whole, tie_leaders

Transform = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Weights by name → weights by name."""


class ByName:
    """A transform of the library: it is given names or patterns, and may write into tensors of its own.

    Those tensors are reused while names, shapes, dtypes, devices and ties of the weights stay the same.

    Attributes:
        takes_parts: whether it is given parts of a model, as in a partial update: a name or a pattern without a weight
            is then no error.
        selects: whether the result is a part of the model on purpose.
    """

    takes_parts = False
    selects = False
    _kept: ClassVar[Mapping[str, Any]] = {"_like": None, "_buffers": None}
    """What it keeps of the weights that it was given; a copy begins with these values."""

    def __init__(self) -> None:
        self.__dict__.update(self._kept)

    def __getstate__(self) -> dict[str, Any]:
        """Return the options: a copy is for other weights."""
        return {**self.__dict__, **self._kept}

    def matching(
        self, patterns: Sequence[str], names: Sequence[str], kind: str = "weight", *, strict: bool = True
    ) -> set[str]:
        """Return those of ``names`` that match one of ``patterns``; ``kind`` says what they are, for the error.

        With ``strict``, a pattern that matches none is an error, except ``*``, or where parts of a model are given.
        """
        found = {pattern: [name for name in names if _matches(name, pattern)] for pattern in patterns}
        unused = [pattern for pattern, some in found.items() if not some and pattern != "*"]
        if unused and strict and not self.takes_parts:
            raise LayoutMismatch(f"no {kind} matches {shown_names(unused)}; there are {shown_names(names)}")
        return set().union(*found.values())

    def buffers(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors to write into for ``weights``.

        Raises:
            LayoutMismatch: some weights are sharded over ranks: PyTorch might then wait for the other ranks.
        """
        ties = tie_leaders(list(weights.values()))
        like = [
            (name, tensor.shape, tensor.dtype, tensor.device, leader)
            for (name, tensor), leader in zip(weights.items(), ties, strict=True)
        ]
        if like != self._like:
            require_whole(weights, weights.values())
            with torch.inference_mode(False):  # inference tensors could not be used in autograd later
                self._buffers = self.allocate(weights)
            self._like = like
        return self._buffers

    def allocate(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return new tensors to write into, by name. Called by ``buffers``, once for weights of one kind."""
        return {}


def compose(transforms: Transform | Sequence[Transform] | None, side: str) -> Chain | None:
    """Return one or several transforms as a chain; None for none. ``Delta`` is left out: it changes no weights.

    Those of the library are copied. ``side`` is ``"send_transform"`` or ``"receive_transform"``.

    Raises:
        TypeError: one of them is not callable.
        ValueError: a ``Delta`` on the receiving side.
    """
    given = _listed(transforms)
    for one in given:
        if not callable(one):
            raise TypeError(f"{side} is a transform, such as wsync.transforms.Cast('bfloat16'), or a list, not {one!r}")
    if side != "send_transform" and any(isinstance(one, Delta) for one in given):
        raise ValueError(f"Delta() belongs in send_transform, not in {side}: workers read differences without it")
    given = [one for one in given if not isinstance(one, Delta)]
    return Chain(given, side).copy() if given else None


def delta_of(transforms: Transform | Sequence[Transform] | None) -> Delta | None:
    """Return the ``Delta`` in a ``send_transform``; None if there is none. ValueError: it is not the last."""
    given = _listed(transforms)
    if any(isinstance(one, Delta) for one in given[:-1]):
        raise ValueError("Delta() is the last of send_transform, once: it encodes what the others return")
    return next((one for one in given[-1:] if isinstance(one, Delta)), None)


def _listed(transforms: Transform | Sequence[Transform] | None) -> list[Any]:
    """Return the transforms one by one, also those of a ``Chain``."""
    if isinstance(transforms, Chain):
        transforms = transforms.transforms
    if not isinstance(transforms, Sequence) or isinstance(transforms, str):
        return [] if transforms is None else [transforms]
    return [each for one in transforms for each in (_listed(one) if isinstance(one, Chain) else [one])]


class Chain:
    """Several transforms, one after the other; ``side`` is named in errors."""

    def __init__(self, transforms: Sequence[Transform], side: str) -> None:
        self.transforms = transforms
        self._side = side

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the transformed weights.

        Raises:
            LayoutMismatch: a transform does not fit the weights; names the side and the transform.
            TypeError: a transform returned something else than tensors by name.
        """
        with torch.no_grad():
            for one in self.transforms:
                where = f"{self._side} {getattr(one, '__name__', None) or repr(one)}"
                try:
                    result = one(weights)
                except LayoutMismatch as error:
                    raise LayoutMismatch(f"{where}: {error}") from error
                except RuntimeError:  # PyTorch's, perhaps because of a DTensor
                    require_whole(weights, weights.values())
                    raise
                if not isinstance(result, Mapping):
                    raise TypeError(f"{where} returned a {type(result).__name__}, not a mapping")
                for name, tensor in result.items():
                    if not isinstance(name, str) or not isinstance(tensor, Tensor):
                        raise TypeError(f"{where} returned {name!r}: {type(tensor).__name__}")
                weights = result
        return dict(weights)

    def for_parts(self) -> Chain:
        """Return a copy for partial updates: names and patterns that have no weight in one are no errors."""
        copied = self.copy()
        for one in copied.transforms:
            if isinstance(one, ByName):
                one.takes_parts = True
        return copied

    def copy(self) -> Chain:
        """Return a copy for other weights: the library's transforms without the tensors and names that they keep."""
        copied: list[Any] = [copy.copy(one) if isinstance(one, ByName) else one for one in self.transforms]
        return Chain(copied, self._side)

    @property
    def selects(self) -> bool:
        """Whether the result is a part of the model on purpose: the receiving model may have more."""
        return any(getattr(one, "selects", False) for one in self.transforms)


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


def require(names: Iterable[str], weights: Mapping[str, Tensor]) -> None:
    """Raise ``LayoutMismatch`` unless ``weights`` have all ``names``."""
    missing = [name for name in names if name not in weights]
    if missing:
        raise LayoutMismatch(f"there is no {shown_names(missing)}; there are {shown_names(weights)}")


def require_distinct(names: Sequence[str]) -> None:
    """Raise ``LayoutMismatch`` if a name is given to two weights."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise LayoutMismatch(f"two weights get the same name: {shown_names(repeated)}")


def require_unused(names: Iterable[str], weights: Mapping[str, Tensor]) -> None:
    """Raise ``LayoutMismatch`` if one of ``names``, which a transform adds, is a weight's name already."""
    used = [name for name in names if name in weights]
    if used:
        raise LayoutMismatch(f"there is another weight named {shown_names(used)} already")


def shown_names(names: Mapping[str, object] | Sequence[str]) -> str:
    """Return the first names, as text."""
    shown = [f"'{name}'" for name in list(names)[:8]]
    return ", ".join(shown) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
