"""What is on its way to each worker, what waits behind it, and the buffers that it lies in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wsync.group import Pair, Work
from wsync.layout import Layout
from wsync.transport import Buffer
from wsync.words import Kind


@dataclass(frozen=True, slots=True)
class Parcel:
    """A version to be sent: the word that announces it, and the buffer that it lies in."""

    kind: Kind
    version: int
    payload: bytes
    slot: int


@dataclass(slots=True)
class Lane:
    """A worker's: at most one parcel is under way, and others wait."""

    pair: Pair | None = None
    under_way: Parcel | None = None
    work: Work | None = None  # of the parcel under way; a transfer ends with its handle
    waiting: deque[Parcel] = field(default_factory=deque)
    generation: int = 0

    def append(self, parcel: Parcel) -> None:
        """Queue a parcel; news takes the place of older news."""
        if self.waiting and parcel.kind is Kind.NEWS and self.waiting[-1].kind is Kind.NEWS:
            self.waiting.pop()
        self.waiting.append(parcel)

    def clear(self) -> None:
        """Forget everything that was to be sent."""
        self.under_way = self.work = None
        self.waiting.clear()

    def drop(self, mark: bytes) -> None:
        """Forget what was to be staged, if its payload begins with ``mark``."""
        self.waiting = deque(
            parcel for parcel in self.waiting if parcel.kind is not Kind.STAGE or not parcel.payload.startswith(mark)
        )

    @property
    def parcels(self) -> Iterable[Parcel]:
        """What is under way, and what waits."""
        return (*([self.under_way] if self.under_way else ()), *self.waiting)


class Flats:
    """Flat buffers of one layout, made when all others are taken.

    Args:
        device: where they lie.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flats: list[tuple[Tensor, Sequence[Tensor]]] = []
        self.reserved: set[int] = set()

    def reserve(self, layout: Layout, taken: Iterable[Parcel | None]) -> Buffer:
        """One in which no parcel lies, and which is not reserved."""
        used = self.reserved | {parcel.slot for parcel in taken if parcel is not None}
        slot = next((slot for slot in range(len(self._flats)) if slot not in used), len(self._flats))
        if slot == len(self._flats):
            flat = torch.zeros(layout.nbytes, dtype=torch.uint8, device=self._device)
            self._flats.append((flat, layout.views(flat)))
        self.reserved.add(slot)
        return Buffer(self._flats[slot][1], slot)

    def flat(self, slot: int) -> Tensor:
        """All bytes of a buffer."""
        return self._flats[slot][0]

    def clear(self) -> None:
        """Let the memory go."""
        self._flats.clear()
