"""For each worker with a transport: the update that is being sent, and those that wait. There are three ways to send.

- to a ``FlatTransport``: ``UPDATE`` (or ``PREPARE``) and ``begin_send``, which comes first if the transport
  ``receives_ahead``
- to a ``TransportBackend``: ``FETCH``, then ``send_weights`` in the worker's transfer thread, then ``UPDATE`` (or
  ``PREPARE``)
- as a difference to the version that the worker has, over the control connection: ``DELTA``, then ``UPDATE`` (or
  ``PREPARE``)
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from wsync.control.messages import REQUEST, Kind, Message
from wsync.control.workers import WorkerConnections
from wsync.sending.queued_update import Delivery, Difference, QueuedUpdate
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
        connections: to all workers.
        in_format: ``(update) -> weights`` in the strategy's format, views of the update's buffer.
        difference: makes what is sent in the place of weights; None: the full weights are sent.
        on_request: whether an update waits until the worker requests it.

    Attributes:
        latest: the newest version that was queued or committed, for a replacement of this worker.
        flat: the transport of this connection, if it is a ``FlatTransport`` (``isinstance`` takes 9 µs: asked once).
        thread: runs ``send_weights`` of the transport, if it is a ``TransportBackend``. Without either the worker is
            not connected, or uses the arena.
        checked: whether updates have a checksum.
        generation: how many workers have connected with this index.
        current: the update that is being sent.
        waiting: those that follow.
        overdue: whether the answer to the current update did not arrive in time, or may have been lost.
    """

    def __init__(
        self,
        worker: int,
        connections: WorkerConnections,
        in_format: Callable[[QueuedUpdate], Any],
        difference: Difference | None,
        *,
        on_request: bool,
    ) -> None:
        self.latest: QueuedUpdate | None = None
        self.flat: FlatTransport | None = None
        self.thread: TransferThread | None = None
        self.checked = False
        self.generation = 0
        self.current: Delivery | None = None
        self.waiting: deque[QueuedUpdate] = deque()
        self.overdue = False
        self._worker = worker
        self._connections = connections
        self._in_format = in_format
        self._difference = difference
        self._on_request = on_request
        self._base: QueuedUpdate | None = None  # what the worker has installed last, if differences are sent
        self._requested = True  # where workers fetch, whether this one waits for a version; the first is sent at once

    @property
    def has_transport(self) -> bool:
        """Whether the worker is connected, and is sent updates by a transport."""
        return self.flat is not None or self.thread is not None

    @property
    def updates(self) -> Iterable[QueuedUpdate]:
        """The base, the latest, the current one, and those that wait: their buffers are in use."""
        current = self.current.update if self.current else None
        return (*(update for update in (self._base, self.latest, current) if update), *self.waiting)

    def _send(self, kind: Kind, version: int = 0, payload: bytes = b"") -> None:
        self._connections.send(self._worker, Message(kind, self._worker, version, payload))

    # --- what waits ---

    def append(self, update: QueuedUpdate) -> None:
        """Queue an update. If the worker has begun to receive, the data is sent at once: ``advance`` announces it."""
        self._append(update)
        if self.current is not None and self.overdue:
            self.overdue = False
            self._send(Kind.RESEND)
        self._begin_ahead()
        if self._on_request and self.has_transport:
            self._send(Kind.NEWEST, update.version, REQUEST.pack(0))

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
        self._send(Kind.NEWEST, self.latest.version if self.latest is not None else 0, REQUEST.pack(number))
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
            if delivery.handed_over and not delivery.sent:
                delivery.aborted = True  # ``PREPARE`` follows the transfer, and ``ABORT`` follows ``PREPARE``
                return
        self._send(Kind.ABORT, transaction)

    # --- what is being sent ---

    def advance(self) -> None:
        """Send the next update; or continue the current one, if a signal handler has raised meanwhile."""
        self._begin_ahead()
        delivery = self.current
        if delivery is None or not self.has_transport:
            return
        if not delivery.announced:
            update = delivery.update
            kind, prefix = (update.kind, update.transaction_prefix) if self.thread is None else (Kind.FETCH, b"")
            if delivery.difference is not None:
                self._send(Kind.DELTA, update.version, delivery.difference)
                kind, prefix = update.kind, update.transaction_prefix
            self._send(kind, update.version, prefix + update.payload(checked=self.checked))
            delivery.announced = True
        if delivery.difference is not None:
            return
        if self.thread is None:
            self._begin_transfer(delivery)
        elif not delivery.handed_over:
            if delivery.update.expressed is None:
                delivery.update.expressed = self._in_format(delivery.update)
            self.thread.begin(delivery.update.expressed)
            delivery.handed_over = True

    def _begin_ahead(self) -> None:
        """Take the next update, if none is being sent; begin its transfer, if the worker has begun to receive."""
        if not self.has_transport:
            return
        if self.current is None and self.waiting and (self._requested or not self._on_request):
            update = self.waiting[0]
            difference = update.difference_to(self._base, self._difference)
            update.carried = max(update.carried, update.buffer.flat.numel() if difference is None else len(difference))
            self.current = Delivery(self.waiting.popleft(), difference=difference)
            self._requested = False
        if self.current is not None and self.flat is not None and self.flat.receives_ahead:
            self._begin_transfer(self.current)

    def _begin_transfer(self, delivery: Delivery) -> None:
        if delivery.transfers or self.flat is None or delivery.difference is not None:
            return
        try:
            self.flat.begin_send(delivery.update.buffer.flat, delivery.transfers)
        except RuntimeError as error:
            self._connections.drain()  # the worker may have sent a reason
            if self._worker in self._connections.workers:
                self._connections.mark_dead(self._worker, f"its transport has broken: {error}")

    def call_ended(self) -> None:
        """If a call of ``send_weights`` has ended, send ``UPDATE`` or ``PREPARE``, or report its error."""
        thread, delivery = self.thread, self.current
        if thread is None or thread.busy or delivery is None or not delivery.handed_over or delivery.sent:
            return
        delivery.sent = True
        update = delivery.update
        if thread.error is None:
            self._send(update.kind, update.version, update.transaction_prefix)
            if delivery.aborted:
                self._send(Kind.ABORT, update.transaction)
            return
        _log.debug("worker %d: send_weights of version %d failed", self._worker, update.version)
        self._send(Kind.ABORT, update.version)
        error = f"its transport could not send:\n{thread.error}"
        self._connections.record(Ack(self._worker, update.version, error=error))
        self.current = None
        self.advance()
