"""What is being sent to each worker by a transport, what waits behind it, and the buffers that it lies in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from wsync.checksum import CHECKSUM, checksum_of
from wsync.control.messages import TRANSACTION, Kind
from wsync.errors import WeightSyncError
from wsync.sending.transfer_thread import TransferThread
from wsync.transport import FlatTransport, Transfer, TransportBackend
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer

_MAX_EXTRA = 1000 << 20  # bytes of extra state in one message


@dataclass(slots=True, eq=False)
class QueuedUpdate:
    """A version to be sent.

    Attributes:
        kind: ``UPDATE``, or ``PREPARE`` in a transaction.
        buffer: where it lies; unchanged while the update is queued or being sent.
        extra: the modules' extra state.
        transaction: its number, for ``PREPARE``.
        checksum: once it has been computed.
    """

    kind: Kind
    version: int
    buffer: Buffer
    extra: bytes = b""
    transaction: int = 0
    checksum: bytes = b""

    @property
    def mark(self) -> bytes:
        """The transaction, as a payload begins with it; empty outside a transaction."""
        return TRANSACTION.pack(self.transaction) if self.kind is Kind.PREPARE else b""

    def payload(self, *, checked: bool) -> bytes:
        """Return the payload that announces it, after the mark: the checksum if ``checked``, and the extra state."""
        if checked and not self.checksum:
            self.checksum = CHECKSUM.pack(checksum_of(self.buffer.flat, self.extra))
        return (self.checksum if checked else b"") + self.extra


@dataclass(slots=True, eq=False)
class Delivery:
    """An update that is being sent. A signal handler may raise at any point; the next use goes on from there.

    Attributes:
        transfers: the asynchronous transfer, once it has begun.
        announced: whether the worker has been told; it may have been told twice.
        handed_over: whether the transfer thread has it.
        sent: whether ``send_weights`` has returned.
    """

    update: QueuedUpdate
    transfers: list[Transfer] = field(default_factory=list)
    announced: bool = False
    handed_over: bool = False
    sent: bool = False


@dataclass(slots=True)
class WorkerQueue:
    """The updates of one worker: at most one is being sent; of those that wait, a newer version replaces an older one.

    So a slow worker delays no other, gets the newest version when it is ready, and memory is bounded.

    Attributes:
        latest: the newest version that was queued or committed, for a worker that takes this one's place.
        transport: of this connection; None while the worker is not connected, or takes weights from the arena.
        flat: ``transport``, if it is a ``FlatTransport``: to ask that of an object takes longer than a system call.
        thread: runs ``send_weights``, for a transport that has no asynchronous transfers.
        generation: how many workers have had this index.
        checked: whether updates carry a checksum.
        overdue: the answer to what is being sent did not arrive in time, or may have been lost.
    """

    latest: QueuedUpdate | None = None
    transport: TransportBackend | FlatTransport | None = None
    flat: FlatTransport | None = None
    thread: TransferThread | None = None
    current: Delivery | None = None
    waiting: deque[QueuedUpdate] = field(default_factory=deque)
    generation: int = 0
    checked: bool = False
    overdue: bool = False

    def append(self, update: QueuedUpdate) -> None:
        """Queue an update."""
        if update.kind is Kind.UPDATE:
            self.latest = update
            if self.waiting and self.waiting[-1].kind is Kind.UPDATE:
                self.waiting.pop()
        self.waiting.append(update)

    def clear(self) -> None:
        """Forget all updates but the latest."""
        self.current = None
        self.waiting.clear()

    def abort(self, transaction: int) -> None:
        """Forget what waits to be prepared in a transaction."""
        self.waiting = deque(update for update in self.waiting if update.transaction != transaction)

    @property
    def updates(self) -> Iterable[QueuedUpdate]:
        """The latest, the current one, and those that wait: their buffers are in use."""
        current = self.current.update if self.current else None
        return (*(update for update in (self.latest, current) if update), *self.waiting)


def check_extra_size(extra: bytes) -> None:
    """Check that extra state fits into one message.

    Raises:
        WeightSyncError: it does not.
    """
    if len(extra) > _MAX_EXTRA:
        raise WeightSyncError(
            f"the modules' extra state has {len(extra) / 2**20:.0f} MiB; a message carries up to "
            f"{_MAX_EXTRA / 2**20:.0f}: register large values as buffers"
        )


class BufferPool:
    """Private buffers of one layout, where there is no arena; a new one is made when all others are in use.

    Args:
        device: where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Buffer] = []

    def buffer(self, layout: Layout, busy: Iterable[int]) -> Buffer:
        """Return a buffer with a ``slot`` that is not in ``busy``."""
        busy = set(busy)
        for buffer in self._buffers:
            if buffer.slot not in busy:
                return buffer
        flat = torch.zeros(layout.nbytes, dtype=torch.uint8, device=self._device)
        self._buffers.append(Buffer.over(layout, flat, len(self._buffers)))
        return self._buffers[-1]

    def clear(self) -> None:
        """Release the memory."""
        self._buffers.clear()
