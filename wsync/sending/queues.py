"""For each worker with a transport: the update that is being sent (``deliveries.py``), and those that wait."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from wsync.control.messages import REQUEST_NUMBER, Kind, Message
from wsync.control.workers import WorkerConnections
from wsync.sending.deliveries import BlockingDelivery, Delivery, DifferenceDelivery, FlatDelivery, InlineDelivery
from wsync.sending.queued_update import MakeDifference, QueuedUpdate
from wsync.sending.transfer_thread import TransferThread
from wsync.transport import FlatTransport
from wsync.types import Ack

_log = logging.getLogger(__name__)


class WorkerQueue:
    """The updates of one worker: at most one is being sent; of those that wait, a newer version replaces an older one.

    So a slow worker delays no other, gets the newest version when it is ready, and memory is bounded. Used under the
    channel's lock.

    Args:
        worker: its index.
        connections: the connections to all workers.
        weights_for_transport: ``(update) -> weights`` in the strategy's format, views of the update's buffer.
        difference: makes what is sent in place of weights; None: the full weights are sent.
        checksum: see ``SenderSettings``.
        on_request: whether an update waits until the worker requests it.

    Attributes:
        worker: as given.
        latest: the newest version that was queued or committed, for a replacement of this worker. None while the worker
            uses the arena, or is not connected and there is an arena: its published word then names that version.
        transport: the transport of this connection, if it is a ``FlatTransport``; the thread that calls its
            ``send_weights``, if it is a ``TransportBackend``; None if the worker is not connected, or uses the arena.
        inline_bytes: the size up to which an update travels in the message that announces it: weights and extra state.
        connection_number: the number of the newest connection accepted with this index, from 1; 0 before the first.
        current: the update that is being sent.
        waiting: those that follow.
        overdue: whether the answer to the current update did not arrive in time, or may have been lost.
    """

    def __init__(
        self,
        worker: int,
        connections: WorkerConnections,
        weights_for_transport: Callable[[QueuedUpdate], Any],
        difference: MakeDifference | None,
        *,
        checksum: bool | None,
        on_request: bool,
    ) -> None:
        self.latest: QueuedUpdate | None = None
        self.transport: FlatTransport | TransferThread | None = None
        self.inline_bytes = 0
        self.connection_number = 0
        self.current: Delivery | None = None
        self.waiting: deque[QueuedUpdate] = deque()
        self.overdue = False
        self.worker = worker
        self._connections = connections
        self._weights_for_transport = weights_for_transport
        self._difference = difference
        self._checksum = checksum
        self._on_request = on_request
        self._base: QueuedUpdate | None = None  # what the worker has installed last, if differences are sent
        # With initiator="receiver": whether the worker has requested a version and was sent none yet. The first version
        # needs no request.
        self._requested = True

    @property
    def is_sending(self) -> bool:
        """Whether ``send_weights`` is running."""
        return isinstance(self.transport, TransferThread) and self.transport.busy

    @property
    def unfinished(self) -> bool:
        """Whether the worker is connected, and an update waits for it or for the end of ``send_weights``."""
        in_call = isinstance(self.current, BlockingDelivery) and self.current.in_call
        return self.transport is not None and (bool(self.waiting) or in_call)

    @property
    def updates(self) -> Iterable[QueuedUpdate]:
        """The base, the latest, the current one, and those that wait: their buffers are in use."""
        current = self.current.update if self.current else None
        return (*(update for update in (self._base, self.latest, current) if update), *self.waiting)

    def _send(self, kind: Kind, version: int = 0, payload: bytes = b"") -> None:
        self._connections.send(self.worker, Message(kind, self.worker, version, payload))

    # --- what waits ---

    def append(self, update: QueuedUpdate) -> None:
        """Queue an update, and begin to send its data, if the worker receives that early. ``advance`` announces it."""
        self._append(update)
        if self.current is not None and self.overdue:
            self.overdue = False
            self._send(Kind.RESEND)
        self._begin_next()
        if self._on_request and self.transport is not None:
            self._send(Kind.NEWEST, update.version, REQUEST_NUMBER.pack(0))

    def _append(self, update: QueuedUpdate) -> None:
        if update.kind is Kind.UPDATE:
            self.latest = update
            if self.waiting and self.waiting[-1].kind is Kind.UPDATE:
                self.waiting.pop()
        self.waiting.append(update)

    def restart(self, update: QueuedUpdate | None) -> None:
        """Drop all updates but the latest, and queue ``update``: for a new connection."""
        self.current, self._base, self._requested = None, None, True
        self.waiting.clear()
        if update is not None:
            self._append(update)

    def request(self, number: int) -> None:
        """Send the newest version, which the worker has requested. What is sent already is not sent again."""
        self._send(Kind.NEWEST, self.latest.version if self.latest is not None else 0, REQUEST_NUMBER.pack(number))
        self._requested = bool(self.waiting)
        self.advance()

    def answered(self, version: int, *, installed: bool) -> None:
        """Record that the worker has answered ``version``, which is ``installed`` or not; send its next update."""
        if self._difference is not None:
            self._base = None
            for update in self.updates:
                if installed and update.version == version:
                    self._base = update
        if self.current is not None and version >= self.current.update.version:
            self.current = None
            if self.waiting:
                self.advance()

    # --- transactions ---

    def commit(self, prepared: QueuedUpdate) -> None:
        """Have the worker install what it has prepared."""
        self.latest = replace(prepared, kind=Kind.UPDATE, transaction=0, checksum=b"")
        self._send(Kind.COMMIT, prepared.transaction)

    def abort(self, transaction: int) -> None:
        """Have the worker drop what it has prepared, or will have prepared when the current transfer has ended."""
        self.waiting = deque(update for update in self.waiting if update.transaction != transaction)
        delivery = self.current
        if delivery is not None and delivery.update.transaction == transaction:
            self.advance()  # a signal handler may have raised before ``PREPARE`` was sent
            if delivery.abort_later():
                return
        self._send(Kind.ABORT, transaction)

    # --- what is being sent ---

    def advance(self) -> None:
        """Send the next update; or continue the current one, if a signal handler has raised meanwhile."""
        self._begin_next()
        if self.current is not None and self.transport is not None:
            self.current.advance()

    def _begin_next(self) -> None:
        """Take the next update, if none is being sent; begin to send its data, if the worker receives that early."""
        if self.transport is None:
            return
        if self.current is None and self.waiting and (self._requested or not self._on_request):
            delivery = self._delivery_to(self.transport, self.waiting[0])
            self._requested = False
            self.current = delivery  # and the next line: no signal handler runs between them, so no update is lost
            self.waiting.popleft()
        if isinstance(self.current, FlatDelivery):
            self.current.begin_ahead()

    def _delivery_to(self, transport: FlatTransport | TransferThread, update: QueuedUpdate) -> Delivery:
        difference = update.difference_to(self._base, self._difference)
        update.carried = max(update.carried, update.buffer.flat.numel() if difference is None else len(difference))
        checked = self._checksum is not False or isinstance(transport, TransferThread)
        if difference is not None:
            return DifferenceDelivery(update, self._send, difference, checked=checked)
        if isinstance(transport, TransferThread):
            return BlockingDelivery(update, self._send, transport, self._weights_for_transport, checked=checked)
        if update.kind is Kind.UPDATE and update.buffer.flat.numel() + len(update.extra) <= self.inline_bytes:
            return InlineDelivery(update, self._send, checked=checked)
        return FlatDelivery(update, self._send, transport, self._on_broken, checked=checked)

    def _on_broken(self, error: object) -> None:
        """Disconnect the worker, because its transport has broken."""
        self._connections.process_arrived_messages()  # the worker may have sent a reason, or have died
        if self.worker in self._connections.workers:
            self._connections.mark_dead(self.worker, f"its transport has broken: {error}")

    @property
    def failure(self) -> str | None:
        """The error of ``send_weights``, from ``call_ended`` until ``report_failure``; None if there is none."""
        return self.current.error if isinstance(self.current, BlockingDelivery) else None

    def call_ended(self) -> None:
        """Called when ``send_weights`` of some worker has returned; if of this one, go on with its update.

        If it has failed, ``report_failure`` is called next, once a death would have been noticed.
        """
        if isinstance(self.current, BlockingDelivery):
            self.current.end_call()
        if self.failure is not None and isinstance(self.transport, TransferThread) and self.transport.broken:
            self._on_broken(self.failure)

    def report_failure(self) -> None:
        """Record that ``send_weights`` has failed, if it has and the worker has not died; send the next update."""
        if self.failure is None or self.current is None:
            return
        version = self.current.update.version
        _log.debug("worker %d: send_weights of version %d failed", self.worker, version)
        self._connections.store(Ack(self.worker, version, error=f"its transport could not send:\n{self.failure}"))
        self.current = None
        self.advance()
