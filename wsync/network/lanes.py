"""What is on its way to each worker, what waits behind it, and the buffers that it lies in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from wsync.errors import WeightSyncError
from wsync.network.pair import Outgoing, Work
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer
from wsync.wire.checksum import CHECKSUM, checksum_of
from wsync.wire.words import Kind

MOST_EXTRA = 1000 << 20  # bytes; who listens to a line takes longer messages for nonsense


@dataclass(slots=True, eq=False)
class Parcel:
    """A version to be sent: what is said of it, and the buffer that it lies in.

    Attributes:
        kind: of the word that announces it.
        version: which.
        slot: the buffer.
        extra: the modules' extra state.
        mark: the transaction, if it is only to be staged.
        seal: the checksum, once there is one.
    """

    kind: Kind
    version: int
    slot: int
    extra: bytes = b""
    mark: bytes = b""
    seal: bytes = b""


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
        checked: whether what it is told of comes with a checksum.
        overdue: the answer to what is under way has not come in time, or may have been lost.
    """

    latest: Parcel | None = None
    pair: Outgoing | None = None
    under_way: Transit | None = None
    waiting: deque[Parcel] = field(default_factory=deque)
    generation: int = 0
    checked: bool = False
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
        """Forget what was to be staged in a transaction."""
        self.waiting = deque(parcel for parcel in self.waiting if parcel.mark != mark)

    @property
    def parcels(self) -> Iterable[Parcel]:
        """The newest, what is under way, and what waits."""
        under_way = self.under_way.parcel if self.under_way else None
        return (*(parcel for parcel in (self.latest, under_way) if parcel), *self.waiting)


def require_room_for(extra: bytes) -> None:
    """See that one message can have so much extra state.

    Raises:
        WeightSyncError: it cannot.
    """
    if len(extra) > MOST_EXTRA:
        raise WeightSyncError(
            f"the modules' extra state has {len(extra) / 2**20:.0f} MiB; a network carries up to "
            f"{MOST_EXTRA / 2**20:.0f}: register what is large as buffers"
        )


class Flats:
    """Flat buffers of one layout, made when all others are taken.

    Args:
        room: makes the bytes of one more.

    Attributes:
        given_away: from which somebody may take weights later, who is no worker any more: never written again.
    """

    def __init__(self, room: Callable[[int], Tensor]) -> None:
        self._room = room
        self._buffers: list[Buffer] = []
        self.reserved: set[int] = set()
        self.given_away: set[int] = set()

    def reserve(self, layout: Layout, taken: Iterable[Parcel]) -> Buffer:
        """One in which no parcel lies, and which is not reserved."""
        used = self.reserved | self.given_away | {parcel.slot for parcel in taken}
        slot = next((slot for slot in range(len(self._buffers)) if slot not in used), len(self._buffers))
        if slot == len(self._buffers):
            self._buffers.append(Buffer.over(layout, self._room(layout.nbytes), slot))
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

    def payload(self, parcel: Parcel, checked: bool) -> bytes:
        """What is said of a parcel: the transaction, the checksum if it is to be ``checked``, and the extra state."""
        if not checked:
            return parcel.mark + parcel.extra
        self.seal(parcel)
        return parcel.mark + parcel.seal + parcel.extra

    def seal(self, parcel: Parcel) -> None:
        """Make its checksum, unless that has been done."""
        if not parcel.seal:
            parcel.seal = CHECKSUM.pack(checksum_of(self.flat(parcel.slot), parcel.extra))

    def flat(self, slot: int) -> Tensor:
        """All bytes of a buffer."""
        return self._buffers[slot].flat

    def clear(self) -> None:
        """Let the memory go."""
        self._buffers.clear()
