"""What one version differs by from older ones, for engines over HTTP: see ``wsync.transforms.Delta``."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from wsync.transforms.delta import Delta
from wsync.weights.layout import ALIGNMENT, Layout


class Base(NamedTuple):
    """The version that an engine has.

    Attributes:
        version: its number.
        flat: its packed bytes, ``uint8[nbytes]``.
    """

    version: int
    flat: Tensor


class Differences:
    """The differences of one version, each made once for all engines that need it. Any thread calls.

    Args:
        delta: makes them.
        layout: the layout of the version.
        flat: its packed bytes, ``uint8[nbytes]``.
    """

    def __init__(self, delta: Delta, layout: Layout, flat: Tensor) -> None:
        self._delta = delta
        self._width = layout.width
        self._flat = flat
        self._lock = threading.Lock()  # guards what follows
        self._made: dict[tuple[int, ...], bytes | None] = {}
        self._carried = 0

    def difference(self, base: Base, begin: int, end: int) -> bytes | None:
        """Return the difference of the bytes from ``begin`` to ``end``; None if they themselves are hardly larger."""
        key = base.version, base.flat.data_ptr(), begin, end  # engines may have different weights of one version
        with self._lock:
            if key not in self._made:
                old, new = base.flat[begin:end], self._flat[begin:end]
                self._made[key] = self._delta.difference(old, base.version, new, self._width)
            return self._made[key]

    @property
    def carried(self) -> int:
        """The most bytes that an engine was sent."""
        with self._lock:
            return self._carried

    def note_carried(self, nbytes: int) -> None:
        """Record how many bytes of weights, or of differences, an engine was sent."""
        with self._lock:
            self._carried = max(self._carried, nbytes)


def range_of(layout: Layout, group: Sequence[int]) -> tuple[int, int]:
    """Return the bytes of the flat buffer in which the entries ``group`` of ``layout`` are, with their padding."""
    ranges = [layout.byte_ranges[index] for index in group]
    end = max(offset + size for offset, size in ranges)
    return min(offset for offset, _ in ranges), -(-end // ALIGNMENT) * ALIGNMENT


def entries_in(layout: Layout, begin: int, end: int) -> list[int]:
    """Return the entries of ``layout`` that are in a range of bytes of the flat buffer: tied ones once, empty ones too.

    Raises:
        ValueError: the range is not one of the flat buffer, has no entry, or has only a part of one.
    """
    if begin % ALIGNMENT or end % ALIGNMENT or not 0 <= begin < end <= layout.nbytes:
        raise ValueError(f"bytes {begin} to {end} are no range of the {layout.nbytes} bytes of the weights")
    ranges = layout.byte_ranges
    whole = [index for index in layout.leaders if begin <= ranges[index][0] and sum(ranges[index]) <= end]
    touched = [index for index in layout.leaders if ranges[index][0] < end and sum(ranges[index]) > begin]
    if not touched or not {*touched} <= {*whole}:
        raise ValueError(f"bytes {begin} to {end} have only a part of a tensor, or none")
    return whole
