"""Weights in pieces that fit a core's cache, for few calls of PyTorch and little temporary memory."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple

from torch import Tensor

_GROUP = 1 << 18  # numbers in a group of pieces: 1 MiB of float32


class Piece(NamedTuple):
    """Some rows of a weight.

    Attributes:
        name: the name of the weight.
        rows: the rows of its first dimension; None for the whole weight.
    """

    name: str
    rows: slice | None

    def of(self, tensor: Tensor) -> Tensor:
        """Return these rows of the weight, or of another tensor with as many."""
        return tensor if self.rows is None else tensor[self.rows]


def grouped(weights: Mapping[str, Tensor], by_rows: Container[str]) -> list[list[Piece]]:
    """Return all of ``weights`` in groups of pieces; each group is on one device.

    Args:
        weights: weights of any sizes.
        by_rows: names of those that may be divided.
    """
    groups: list[list[Piece]] = []
    room, device = 0, None
    for name, tensor in weights.items():
        count = tensor.shape[0] if name in by_rows and tensor.dim() else 1
        rows = max(1, _GROUP * count // max(tensor.numel(), 1))  # in one piece
        for begin in range(0, count, rows) if tensor.numel() else ():
            size = tensor.numel() // count * min(rows, count - begin)
            if size > room or tensor.device != device:
                groups.append([])
                room, device = _GROUP, tensor.device
            groups[-1].append(Piece(name, slice(begin, begin + rows) if rows < count else None))
            room -= size
    return groups
