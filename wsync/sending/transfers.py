"""Updates to workers that receive them by a transport.

- to a ``FlatTransport``: ``UPDATE`` (or ``PREPARE``) and ``begin_send``, which comes first if the transport
  ``receives_ahead``
- to a ``TransportBackend``: ``FETCH``, then ``send_weights`` in the worker's transfer thread, then ``UPDATE`` (or
  ``PREPARE``)
- as a difference to the version that the worker has, over the control connection: ``DELTA``, then ``UPDATE`` (or
  ``PREPARE``)
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from wsync.control.messages import REQUEST, Kind, Message
from wsync.control.workers import WorkerConnections
from wsync.errors import NotConnected, SyncTimeout
from wsync.forming import Forming
from wsync.sending.queues import Delivery, QueuedUpdate, WorkerQueue
from wsync.sending.transfer_thread import TransferThread
from wsync.transport import FlatTransport, TransportBackend, TransportFactory
from wsync.types import Ack

_log = logging.getLogger(__name__)


class Transfers:
    """The queues of all workers. All methods are called under the channel's lock.

    Args:
        connections: to all workers.
        num_workers: the number of workers.
        create_transport: the scheme's; None if every worker must use the arena: no update is then sent here.
        in_format: ``(update) -> weights`` in the strategy's format, views of the update's buffer.
        checksum: whether updates have a checksum; None: they have.
        difference: ``(base, update) -> difference``, see ``Delta.difference``; None: the full weights are sent.
        on_request: whether an update waits until its worker requests it.

    Attributes:
        ending: threads that end soon: of closed transports, and of set-ups that have failed.
    """

    def __init__(
        self,
        connections: WorkerConnections,
        num_workers: int,
        create_transport: TransportFactory | None,
        in_format: Callable[[QueuedUpdate], Any],
        checksum: bool | None,
        difference: Callable[[QueuedUpdate, QueuedUpdate], bytes | None] | None = None,
        *,
        on_request: bool = False,
    ) -> None:
        self.queues = [WorkerQueue() for _ in range(num_workers)]
        self.ending: list[threading.Thread] = []
        self._connections = connections
        self._create_transport = create_transport
        self._in_format = in_format
        self._checksum = checksum
        self._difference = difference
        self._on_request = on_request
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._abandoned: set[int] = set()  # slots that a transfer to a former worker may still read: never reused
        connections.watch(self._wake, self._calls_ended)

    @property
    def busy_slots(self) -> set[int]:
        """The slots of buffers that must not be written."""
        return self._abandoned.union(update.buffer.slot for queue in self.queues for update in queue.updates)

    @property
    def unfinished(self) -> bool:
        """Whether an update waits for a connected worker, or for its transfer thread."""
        return any(
            queue.waiting or (queue.thread is not None and queue.thread.busy)
            for queue in self.queues
            if queue.transport is not None
        )

    # --- connections ---

    def connect(self, worker: int, deadline: float | None) -> None:
        """Set up the transport of a worker that has connected, and send the update that waits for it.

        Raises:
            SyncTimeout: it could not be set up; the worker is disconnected.
        """
        queue = self.queues[worker]
        if self._create_transport is None:
            return  # the worker disconnects
        transport = self._create_transport(worker)

        def set_up() -> None:
            assert isinstance(transport, TransportBackend), "called unless it is a FlatTransport"
            transport.setup_connection_and_weights_on_sender()

        try:
            with self._connections.reading_directly(worker) as connection:
                forming = Forming(connection, worker, deadline, transport, 0, queue.generation, set_up)
                try:
                    forming.wait()
                finally:
                    self._keep(forming.thread)
        except NotConnected as error:
            self._connections.mark_dead(worker, str(error))
            return
        except Exception as error:
            self._connections.disconnect(worker)
            message = f"worker {worker}: the set-up of its transport raised {type(error).__name__}: {error}"
            raise SyncTimeout(message, {worker: str(error)}) from error
        queue.transport = transport
        if isinstance(transport, FlatTransport):
            queue.flat, queue.checked = transport, self._checksum is not False
        else:
            queue.thread, queue.checked = TransferThread(transport, self._wake), True
        self.advance(worker)

    def disconnect(self, worker: int) -> None:
        """Close the transport of a worker that has gone, and drop its updates but the latest."""
        queue = self.queues[worker]
        flat, thread, current = queue.flat, queue.thread, queue.current
        queue.transport = queue.flat = queue.thread = None
        queue.restart(None)
        queue.base, queue.requested = None, True
        if thread is not None:
            if thread.busy and current is not None:
                self._abandoned.add(current.update.buffer.slot)  # send_weights may still read it
            self._keep(thread.close())
        elif flat is not None:
            pending = current.transfers[0] if current is not None and current.transfers else None
            if flat.close(pending) and current is not None:
                self._abandoned.add(current.update.buffer.slot)

    def _keep(self, thread: threading.Thread) -> None:
        """Add a thread to ``ending``, and drop those that have ended."""
        self.ending = [one for one in (*self.ending, thread) if one.is_alive()]

    # --- updates ---

    def enqueue(self, update: QueuedUpdate, workers: Iterable[int]) -> None:
        """Send an update to workers that are ready for it; the others get it, or a newer one, later.

        Where transports receive ahead, the data is sent to all workers before it is announced: a worker that has begun
        to receive then wakes once, not once for the message and again for the data.
        """
        workers = tuple(workers)
        for worker in workers:
            queue = self.queues[worker]
            queue.append(update)
            if queue.current is not None and queue.overdue:
                queue.overdue = False
                self._connections.send(worker, Message(Kind.RESEND, worker))
            self._begin_ahead(worker, queue)
            if self._on_request and queue.transport is not None:
                self._connections.send(worker, Message(Kind.NEWEST, worker, update.version, REQUEST.pack(0)))
        for worker in workers:
            self.advance(worker)

    def request(self, worker: int, number: int) -> None:
        """Send a worker the newest version, which it has requested. What is sent already is not sent again."""
        queue = self.queues[worker]
        newest = queue.latest.version if queue.latest is not None else 0
        self._connections.send(worker, Message(Kind.NEWEST, worker, newest, REQUEST.pack(number)))
        queue.requested = bool(queue.waiting)
        self.advance(worker)

    def commit(self, worker: int, prepared: QueuedUpdate) -> None:
        """Have a worker install what it has prepared."""
        self.queues[worker].latest = replace(prepared, kind=Kind.UPDATE, transaction=0, checksum=b"")
        self._connections.send(worker, Message(Kind.COMMIT, worker, prepared.transaction))

    def abort(self, worker: int, transaction: int) -> None:
        """Have a worker drop what it has prepared, or will have prepared when the current transfer has ended."""
        queue = self.queues[worker]
        queue.abort(transaction)
        delivery = queue.current
        if delivery is not None and delivery.update.transaction == transaction:
            self.advance(worker)  # a signal handler may have raised before ``PREPARE`` was sent
            if delivery.handed_over and not delivery.sent:
                delivery.aborted = True  # ``PREPARE`` follows the transfer, and ``ABORT`` follows ``PREPARE``
                return
        self._connections.send(worker, Message(Kind.ABORT, worker, transaction))

    def carried_bytes(self, version: int) -> int:
        """Return the most bytes of weights that a worker was sent for the newest ``version``; 0 if none was."""
        latest = [queue.latest for queue in self.queues if queue.latest is not None]
        return max((update.carried for update in latest if update.version == version), default=0)

    def answered(self, worker: int, version: int, *, installed: bool) -> None:
        """Record that the worker has answered ``version``, which is ``installed`` or not; send its next update."""
        queue = self.queues[worker]
        if self._difference is not None:
            queue.answered(version, installed=installed)
        if queue.current is not None and version >= queue.current.update.version:
            queue.current = None
            if queue.waiting:
                self.advance(worker)

    def advance(self, worker: int) -> None:
        """Send the next update; or continue the current one, if a signal handler has raised meanwhile."""
        queue = self.queues[worker]
        self._begin_ahead(worker, queue)
        delivery = queue.current
        if queue.transport is None or delivery is None:
            return
        if not delivery.announced:
            update = delivery.update
            kind, prefix = (update.kind, update.transaction_prefix) if queue.thread is None else (Kind.FETCH, b"")
            if delivery.difference is not None:
                self._connections.send(worker, Message(Kind.DELTA, worker, update.version, delivery.difference))
                kind, prefix = update.kind, update.transaction_prefix
            payload = prefix + update.payload(checked=queue.checked)
            self._connections.send(worker, Message(kind, worker, update.version, payload))
            delivery.announced = True
        if delivery.difference is not None:
            return
        if queue.thread is None:
            self._begin_transfer(worker, queue, delivery)
        elif not delivery.handed_over:
            if delivery.update.expressed is None:
                delivery.update.expressed = self._in_format(delivery.update)
            queue.thread.begin(delivery.update.expressed)
            delivery.handed_over = True

    def _begin_ahead(self, worker: int, queue: WorkerQueue) -> None:
        """Take the next update, if none is being sent; begin its transfer, if the worker has begun to receive."""
        if queue.transport is None:
            return
        if queue.current is None and queue.waiting and (queue.requested or not self._on_request):
            update = queue.waiting[0]
            difference = update.difference_to(queue.base, self._difference)
            update.carried = max(update.carried, update.buffer.flat.numel() if difference is None else len(difference))
            queue.current = Delivery(queue.waiting.popleft(), difference=difference)
            queue.requested = False
        if queue.current is not None and queue.flat is not None and queue.flat.receives_ahead:
            self._begin_transfer(worker, queue, queue.current)

    def _begin_transfer(self, worker: int, queue: WorkerQueue, delivery: Delivery) -> None:
        if delivery.transfers or queue.flat is None or delivery.difference is not None:
            return
        try:
            queue.flat.begin_send(delivery.update.buffer.flat, delivery.transfers)
        except RuntimeError as error:
            self._connections.drain()  # the worker may have sent a reason
            if worker in self._connections.workers:
                self._connections.mark_dead(worker, f"its transport has broken: {error}")

    def _calls_ended(self) -> None:
        """Send ``UPDATE`` or ``PREPARE`` for each call of ``send_weights`` that has ended, or report its error."""
        os.eventfd_read(self._wake)
        for worker, queue in enumerate(self.queues):
            delivery = queue.current
            if queue.thread is None or queue.thread.busy or delivery is None or not delivery.handed_over:
                continue
            if delivery.sent:
                continue
            delivery.sent = True
            update, error = delivery.update, queue.thread.error
            if error is None:
                self._connections.send(worker, Message(update.kind, worker, update.version, update.transaction_prefix))
                if delivery.aborted:
                    self._connections.send(worker, Message(Kind.ABORT, worker, update.transaction))
                continue
            _log.debug("worker %d: send_weights of version %d failed", worker, update.version)
            self._connections.send(worker, Message(Kind.ABORT, worker, update.version))
            self._connections.record(Ack(worker, update.version, error=f"its transport could not send:\n{error}"))
            queue.current = None
            self.advance(worker)

    def give_up(self, workers: Collection[int]) -> None:
        """Called at an update's deadline: disconnect those of ``workers`` with ``send_weights`` still running.

        The others stay connected. ``mark_overdue`` follows.
        """
        for worker in workers:
            queue = self.queues[worker]
            if queue.thread is not None and queue.thread.busy:
                self._connections.mark_dead(worker, "its transport's send_weights did not return in time")

    def mark_overdue(self, workers: Collection[int]) -> None:
        """Record that answers of ``workers`` are late, or may have been lost: ``enqueue`` requests them again."""
        for worker in workers:
            queue = self.queues[worker]
            queue.overdue = queue.current is not None

    def close(self) -> None:
        """Release the rest. Called after the workers were disconnected."""
        os.close(self._wake)
