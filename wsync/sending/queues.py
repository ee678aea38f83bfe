"""For each worker with a transport: the update that is being sent, and those that wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from wsync.checksum import CHECKSUM, checksum_of
from wsync.control.messages import TRANSACTION, Kind
from wsync.errors import WeightSyncError
from wsync.sending.transfer_thread import TransferThread
from wsync.transport import FlatTransport, Transfer, TransportBackend
from wsync.weights.packing import Buffer

_MAX_EXTRA = 1000 << 20  # bytes of extra state, or of a difference, in one message


@dataclass(slots=True, eq=False)
class QueuedUpdate:
    """A version to be sent.

    Attributes:
        kind: ``UPDATE``, or ``PREPARE`` in a transaction.
        buffer: the packed weights; unchanged while the update is queued or being sent.
        extra: the modules' extra state.
        transaction: its number, for ``PREPARE``.
        checksum: empty until it is computed.
        expressed: the weights in the strategy's format, once a transport was given them.
        carried: the most bytes of weights that a worker was sent for it, with a transport; 0 if there was none.
        differences: to older versions, by version, as far as they were needed; None where one would not be smaller.
    """

    kind: Kind
    version: int
    buffer: Buffer
    extra: bytes = b""
    transaction: int = 0
    checksum: bytes = b""
    expressed: Any = None
    carried: int = 0
    differences: dict[int, bytes | None] = field(default_factory=dict)

    @property
    def transaction_prefix(self) -> bytes:
        """The beginning of a ``PREPARE`` payload: the transaction; empty outside a transaction."""
        return TRANSACTION.pack(self.transaction) if self.kind is Kind.PREPARE else b""

    def payload(self, *, checked: bool) -> bytes:
        """Return the rest of the payload: the checksum if ``checked``, and the extra state."""
        if checked and not self.checksum:
            self.checksum = CHECKSUM.pack(checksum_of(self.buffer.flat, self.extra))
        return (self.checksum if checked else b"") + self.extra

    def difference_to(self, base: QueuedUpdate | None, make: Difference | None) -> bytes | None:
        """Return what is sent in the place of this update to a worker that has ``base``; None: the full weights."""
        if make is None or base is None:
            return None
        known = self.differences
        if base.version not in known:
            found = make(base, self)
            known[base.version] = found if found is not None and len(found) <= _MAX_EXTRA else None
        return known[base.version]


Difference = Callable[[QueuedUpdate, QueuedUpdate], bytes | None]
"""``(base, update) -> difference``: see ``Delta.difference``."""


def check_extra(extra: bytes) -> None:
    """Check that extra state fits into one message.

    Raises:
        WeightSyncError: it does not.
    """
    if len(extra) > _MAX_EXTRA:
        raise WeightSyncError(
            f"the modules' extra state has {len(extra) / 2**20:.0f} MiB; a message carries up to "
            f"{_MAX_EXTRA / 2**20:.0f}: register large values as buffers"
        )


@dataclass(slots=True, eq=False)
class Delivery:
    """An update that is being sent. If a signal handler raises in between, the next use continues from there.

    Attributes:
        transfers: the asynchronous transfer, once it has begun.
        announced: whether the message about it was sent; it may have been sent twice.
        handed_over: whether the transfer thread has it.
        sent: whether ``send_weights`` has returned.
        difference: what travels in the place of the weights; None: the weights, by the transport.
        aborted: whether the transaction was aborted while ``send_weights`` ran.
    """

    update: QueuedUpdate
    transfers: list[Transfer] = field(default_factory=list)
    announced: bool = False
    handed_over: bool = False
    sent: bool = False
    difference: bytes | None = None
    aborted: bool = False


@dataclass(slots=True)
class WorkerQueue:
    """The updates of one worker: at most one is being sent; of those that wait, a newer version replaces an older one.

    So a slow worker delays no other, gets the newest version when it is ready, and memory is bounded. Used under the
    channel's lock.

    Attributes:
        latest: the newest version that was queued or committed, for a replacement of this worker.
        transport: of this connection; None while the worker is not connected, or uses the arena.
        flat: ``transport``, if it is a ``FlatTransport``: to ask that with ``isinstance`` takes 9 µs.
        thread: runs ``send_weights``, for a transport without asynchronous transfers.
        generation: how many workers have connected with this index.
        checked: whether updates have a checksum.
        base: the version that the worker has installed last, if differences are sent.
        requested: whether the worker waits for a version, where workers fetch; the first one is sent at once.
        overdue: whether the answer to the current update did not arrive in time, or may have been lost.
    """

    latest: QueuedUpdate | None = None
    transport: TransportBackend | FlatTransport | None = None
    flat: FlatTransport | None = None
    thread: TransferThread | None = None
    current: Delivery | None = None
    waiting: deque[QueuedUpdate] = field(default_factory=deque)
    generation: int = 0
    checked: bool = False
    base: QueuedUpdate | None = None
    requested: bool = True
    overdue: bool = False

    def append(self, update: QueuedUpdate) -> None:
        """Queue an update."""
        if update.kind is Kind.UPDATE:
            self.latest = update
            if self.waiting and self.waiting[-1].kind is Kind.UPDATE:
                self.waiting.pop()
        self.waiting.append(update)

    def restart(self, update: QueuedUpdate | None) -> None:
        """Drop all updates but the latest, and queue ``update``: for a new connection."""
        self.current = None
        self.waiting.clear()
        if update is not None:
            self.append(update)

    def answered(self, version: int, *, installed: bool) -> None:
        """Record which version the worker has, to which a difference can be sent."""
        self.base = None
        for update in self.updates:
            if installed and update.version == version:
                self.base = update

    def abort(self, transaction: int) -> None:
        """Drop what waits to be prepared in a transaction."""
        self.waiting = deque(update for update in self.waiting if update.transaction != transaction)

    @property
    def updates(self) -> Iterable[QueuedUpdate]:
        """The base, the latest, the current one, and those that wait: their buffers are in use."""
        current = self.current.update if self.current else None
        return (*(update for update in (self.base, self.latest, current) if update), *self.waiting)
