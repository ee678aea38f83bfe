"""Several transforms, one after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wsync.errors import LayoutMismatch
from wsync.loops.tensors import require_whole
from wsync.transforms.buffers import Buffered
from wsync.transforms.delta import Delta
from wsync.transforms.patterns import ByName

Transform = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Weights by name → weights by name."""


def compose(transforms: Transform | Sequence[Transform] | None, side: str) -> Chain | None:
    """Return one or several transforms as a chain; None for none. ``Delta`` is left out: it changes no weights.

    Those of the library are copied; a user's own function is not: what it reads may change from version to version.

    Args:
        transforms: applied in order.
        side: ``"send_transform"`` or ``"receive_transform"``, for errors.

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
    """Return the ``Delta`` in a ``send_transform``; None if there is none.

    Raises:
        ValueError: something comes after it, itself included.
    """
    given = _listed(transforms)
    if any(isinstance(one, Delta) for one in given[:-1]):
        raise ValueError("Delta() is the last of send_transform, once: it encodes what the others return")
    return next((one for one in given[-1:] if isinstance(one, Delta)), None)


def _listed(transforms: Transform | Sequence[Transform] | None) -> list[Any]:
    """Return the transforms one by one, also those of a ``Chain``."""
    if transforms is None:
        return []
    if isinstance(transforms, Chain):
        transforms = transforms.transforms
    elif not isinstance(transforms, Sequence) or isinstance(transforms, str):
        return [transforms]
    return [each for one in transforms for each in (_listed(one) if isinstance(one, Chain) else [one])]


class Chain:
    """Several transforms, one after the other.

    Args:
        transforms: in the order in which they are applied.
        side: named in errors.
    """

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
                try:
                    result = one(weights)
                except LayoutMismatch as error:
                    raise LayoutMismatch(f"{self._side} {_name(one)}: {error}") from error
                except RuntimeError:  # PyTorch's, perhaps because of a DTensor
                    require_whole(weights, weights.values())
                    raise
                if not isinstance(result, Mapping):
                    raise TypeError(f"{self._side} {_name(one)} returned a {type(result).__name__}, not a mapping")
                for name, tensor in result.items():
                    if not isinstance(name, str) or not isinstance(tensor, Tensor):
                        raise TypeError(f"{self._side} {_name(one)} returned {name!r}: {type(tensor).__name__}")
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
        """Return a copy for other weights: their names are checked anew."""
        return Chain([_copied(one) for one in self.transforms], self._side)

    @property
    def selects(self) -> bool:
        """Whether the result is a part of the model on purpose: the receiving model may have more."""
        return any(getattr(one, "selects", False) for one in self.transforms)


def _copied(transform: Transform) -> Transform:
    """Return a copy of a library's transform, without the tensors that it keeps; a user's own function as it is."""
    copied: Any = copy.copy(transform) if isinstance(transform, ByName | Buffered) else transform
    return copied


def _name(transform: Transform) -> str:
    return getattr(transform, "__name__", None) or repr(transform)
