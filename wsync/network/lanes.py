"""What is on its way to each worker, what waits behind it, and the buffers that it lies in."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wsync.errors import WeightSyncError
from wsync.network.group import Pair, Work
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer
from wsync.wire.checksum import CHECKSUM, checksum_of
from wsync.wire.words import Kind

MOST_EXTRA = 1000 << 20  # bytes; who listens to a line takes longer messages for nonsense


@dataclass(slots=True, eq=False)
class Parcel:
    """A version to be sent: the word that announces it, and the buffer that it lies in."""

    kind: Kind
    version: int
    payload: bytes
    slot: int


@dataclass(slots=True, eq=False)
class Transit:
    """A parcel under way. A signal may strike at any point; whoever uses the lane next goes on from there.

    Attributes:
        works: its transfer, once that has begun; it ends with its handle.
        announced: whether the worker has been told of it, for certain. It may have been told twice.
    """

    parcel: Parcel
    works: list[Work] = field(default_factory=list)
    announced: bool = False


@dataclass(slots=True)
class Lane:
    """A worker's: at most one parcel is under way, and others wait.

    Attributes:
        latest: the newest version that was handed over for it: for who comes in its place.
        overdue: the answer to what is under way has not come in time, or may have been lost.
    """

    latest: Parcel | None = None
    pair: Pair | None = None
    under_way: Transit | None = None
    waiting: deque[Parcel] = field(default_factory=deque)
    generation: int = 0
    overdue: bool = False

    def append(self, parcel: Parcel) -> None:
        """Queue a parcel; news takes the place of older news."""
        if parcel.kind is Kind.NEWS:
            self.latest = parcel
        if self.waiting and parcel.kind is Kind.NEWS and self.waiting[-1].kind is Kind.NEWS:
            self.waiting.pop()
        self.waiting.append(parcel)

    def clear(self) -> None:
        """Forget everything that was to be sent, but for the newest."""
        self.under_way = None
        self.waiting.clear()

    def drop(self, mark: bytes) -> None:
        """Forget what was to be staged, if its payload begins with ``mark``."""
        self.waiting = deque(
            parcel for parcel in self.waiting if parcel.kind is not Kind.STAGE or not parcel.payload.startswith(mark)
        )

    @property
    def parcels(self) -> Iterable[Parcel]:
        """The newest, what is under way, and what waits."""
        under_way = self.under_way.parcel if self.under_way else None
        return (*(parcel for parcel in (self.latest, under_way) if parcel), *self.waiting)


class Flats:
    """Flat buffers of one layout, made when all others are taken.

    Args:
        device: where they lie.

    Attributes:
        given_away: from which somebody may take weights later, who is no worker any more: never written again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Buffer] = []
        self.reserved: set[int] = set()
        self.given_away: set[int] = set()

    def reserve(self, layout: Layout, taken: Iterable[Parcel]) -> Buffer:
        """One in which no parcel lies, and which is not reserved."""
        used = self.reserved | self.given_away | {parcel.slot for parcel in taken}
        slot = next((slot for slot in range(len(self._buffers)) if slot not in used), len(self._buffers))
        if slot == len(self._buffers):
            flat = torch.zeros(layout.nbytes, dtype=torch.uint8, device=self._device)
            self._buffers.append(Buffer.over(layout, flat, slot))
        self.reserved.add(slot)
        return self._buffers[slot]

    def turns(self, layout: Layout, latest: Collection[Parcel]) -> tuple[Buffer, Buffer] | None:
        """The buffer in which every worker's newest version lies, and a free one, to be filled in turn by plain bytes.

        None if workers have different versions, or that cannot be done: on a GPU, of complex numbers, of what is given
        away.
        """
        slots = {parcel.slot for parcel in latest}
        newest = self._buffers[slots.pop()] if len(slots) == 1 and not self.reserved else None
        if newest is None or newest.room is None or newest.slot in self.given_away:
            return None
        free = self.reserve(layout, latest)
        self.reserved.clear()
        return newest, free

    def sealed(self, slot: int, extra: bytes, checksum: bool) -> bytes:
        """What is said beside the weights in a buffer: a checksum, if there is to be one, and the extra state.

        Raises:
            WeightSyncError: that is more than one message may have.
        """
        if len(extra) > MOST_EXTRA:
            raise WeightSyncError(
                f"the modules' extra state has {len(extra) / 2**20:.0f} MiB; a network carries up to "
                f"{MOST_EXTRA / 2**20:.0f}: register what is large as buffers"
            )
        return CHECKSUM.pack(checksum_of(self.flat(slot), extra)) + extra if checksum else extra

    def flat(self, slot: int) -> Tensor:
        """All bytes of a buffer."""
        return self._buffers[slot].flat

    def clear(self) -> None:
        """Let the memory go."""
        self._buffers.clear()
