"""Updates to workers that receive them by a transport: prepare, commit and abort, for every transport.

    flat transports     begin_send, then UPDATE (or PREPARE): the worker receives what was announced
    all others          FETCH, send_weights in the worker's transfer thread, then UPDATE (or PREPARE)

All methods are called under the sender's lock.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from wsync.control.messages import Kind, Message
from wsync.control.workers import WorkerConnections
from wsync.errors import NotConnected, SyncTimeout
from wsync.forming import Forming, close_unformed, forming_deadline
from wsync.sending.queues import Delivery, QueuedUpdate, WorkerQueue
from wsync.sending.transfer_thread import TransferThread
from wsync.transport import FlatTransport, TransportFactory
from wsync.types import Ack

_log = logging.getLogger(__name__)


class Transfers:
    """The queues of all workers, and what moves them on.

    Args:
        connections: to all workers.
        num_workers: how many there are.
        create_transport: the scheme's.
        express: ``(update) -> weights`` in the strategy's format, views of the update's buffer.
        checksum: whether updates carry a checksum; None: they do.

    Attributes:
        ending: threads that end soon: of closed transports, and of transports that were given up during set-up.
    """

    def __init__(
        self,
        connections: WorkerConnections,
        num_workers: int,
        create_transport: TransportFactory,
        express: Callable[[QueuedUpdate], Any],
        checksum: bool | None,
    ) -> None:
        self.queues = [WorkerQueue() for _ in range(num_workers)]
        self.ending: list[threading.Thread] = []
        self._connections = connections
        self._create_transport = create_transport
        self._express = express
        self._checksum = checksum
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._given_away: set[int] = set()  # slots that a former worker may yet receive: never written again
        connections.watch(self._wake, self._calls_ended)

    @property
    def busy_slots(self) -> set[int]:
        """The slots of buffers that must not be written."""
        return self._given_away.union(update.buffer.slot for queue in self.queues for update in queue.updates)

    @property
    def unfinished(self) -> bool:
        """Whether anything has to be done later for a connected worker, without a call of the trainer."""
        return any(
            queue.waiting or (queue.thread is not None and queue.thread.busy)
            for queue in self.queues
            if queue.transport is not None
        )

    # --- connections ---

    def connect(self, worker: int, deadline: float | None) -> None:
        """Set up the transport of a worker that has connected, and send what waits for it.

        Raises:
            SyncTimeout: it could not be set up; the worker is disconnected.
        """
        queue = self.queues[worker]
        transport = self._create_transport(worker)
        try:
            with self._connections.reading_directly(worker) as connection:
                if isinstance(transport, FlatTransport):
                    latest, generation, host = forming_deadline(deadline), queue.generation, connection.local_host
                    forming = Forming(
                        connection,
                        worker,
                        deadline,
                        lambda store: transport.form(store, 0, generation, host, latest),
                    )
                else:
                    set_up = transport.setup_connection_and_weights_on_sender
                    forming = Forming(connection, worker, deadline, lambda store: set_up())
                try:
                    forming.wait()
                except BaseException:
                    close_unformed(transport)
                    raise
                finally:
                    forming.close()
                    if forming.thread.is_alive():
                        self.ending.append(forming.thread)
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
        """Close the transport of a worker that has gone, and forget its updates but the latest."""
        queue = self.queues[worker]
        flat, thread, current = queue.flat, queue.thread, queue.current
        queue.transport = queue.flat = queue.thread = None
        queue.clear()
        if thread is not None:
            if thread.busy and current is not None:
                self._given_away.add(current.update.buffer.slot)  # send_weights may still read it
            self.ending.append(thread.close())
        elif flat is not None:
            pending = current.transfers[0] if current is not None and current.transfers else None
            if flat.close(pending) and current is not None:
                self._given_away.add(current.update.buffer.slot)

    def rejoin(self, worker: int) -> None:
        """Queue the latest version for a worker that takes another one's place."""
        queue = self.queues[worker]
        queue.clear()
        if queue.latest is not None:
            queue.append(queue.latest)

    # --- updates ---

    def enqueue(self, update: QueuedUpdate, workers: Iterable[int]) -> None:
        """Send an update to workers that are ready for it; others get it, or a newer one, when they are.

        The data goes to all of them before any is told of it: a worker that has begun to receive then finds it there,
        instead of waking for the message and once more for the data; and a checksum is made while it is on its way.
        """
        workers = tuple(workers)
        for worker in workers:
            queue = self.queues[worker]
            queue.append(update)
            if queue.current is not None and queue.overdue:
                queue.overdue = False
                self._connections.send(worker, Message(Kind.RESEND, worker))
            self._begin_ahead(worker, queue)
        for worker in workers:
            self.advance(worker)

    def commit(self, worker: int, prepared: QueuedUpdate) -> None:
        """Have a worker install what it has prepared."""
        self.queues[worker].latest = replace(prepared, kind=Kind.UPDATE, transaction=0, checksum=b"")
        self._connections.send(worker, Message(Kind.COMMIT, worker, prepared.transaction))

    def abort(self, worker: int, transaction: int) -> None:
        """Have a worker forget what it has prepared."""
        self.queues[worker].abort(transaction)
        self._connections.send(worker, Message(Kind.ABORT, worker, transaction))

    def answered(self, worker: int, version: int) -> None:
        """The worker has answered ``version``: send what comes next."""
        queue = self.queues[worker]
        if queue.current is not None and version >= queue.current.update.version:
            queue.current = None
            self.advance(worker)

    def advance(self, worker: int) -> None:
        """Send the next update; or do what is left of the current one, where a signal handler has raised."""
        queue = self.queues[worker]
        self._begin_ahead(worker, queue)
        delivery = queue.current
        if queue.transport is None or delivery is None:
            return
        if not delivery.announced:
            update = delivery.update
            kind, mark = (update.kind, update.mark) if queue.thread is None else (Kind.FETCH, b"")
            payload = mark + update.payload(checked=queue.checked)
            self._connections.send(worker, Message(kind, worker, update.version, payload))
            delivery.announced = True
        if queue.thread is None:
            self._begin_transfer(worker, queue, delivery)
        elif not delivery.handed_over:
            queue.thread.begin(self._express(delivery.update))
            delivery.handed_over = True

    def _begin_ahead(self, worker: int, queue: WorkerQueue) -> None:
        """Take the next update, if none is being sent; begin its transfer, if the worker has begun to receive."""
        if queue.transport is None:
            return
        if queue.current is None and queue.waiting:
            queue.current = Delivery(queue.waiting.popleft())
        if queue.current is not None and queue.flat is not None and queue.flat.receives_ahead:
            self._begin_transfer(worker, queue, queue.current)

    def _begin_transfer(self, worker: int, queue: WorkerQueue, delivery: Delivery) -> None:
        if delivery.transfers or queue.flat is None:
            return
        try:
            queue.flat.begin_send(delivery.update.buffer.flat, delivery.transfers)
        except RuntimeError as error:
            self._connections.drain()  # the worker may have left, and have sent why
            if worker in self._connections.workers:
                self._connections.mark_dead(worker, f"its transport has broken: {error}")

    def _calls_ended(self) -> None:
        """Some transfer threads have ended a call: commit what was sent."""
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
                self._connections.send(worker, Message(update.kind, worker, update.version, update.mark))
                continue
            _log.debug("worker %d: send_weights of version %d failed", worker, update.version)
            self._connections.send(worker, Message(Kind.ABORT, worker, update.version))
            self._connections.record(Ack(worker, update.version, error=f"its transport could not send:\n{error}"))
            queue.current = None
            self.advance(worker)

    def give_up(self, workers: Collection[int]) -> None:
        """The deadline of an update has passed: disconnect those of ``workers`` with a transport still sending.

        Others stay connected; the last answer of a flat transport's worker may have been lost, and is asked for again.
        """
        for worker in workers:
            queue = self.queues[worker]
            if queue.thread is not None and queue.thread.busy:
                self._connections.mark_dead(worker, "its transport's send_weights did not return in time")
            queue.overdue = True

    def close(self) -> None:
        """Release what is left; the workers have been disconnected before."""
        os.close(self._wake)


def join_all(threads: Sequence[threading.Thread], timeout: float) -> None:
    """Wait for threads that end soon: one that returned into an interpreter that is ending would abort it."""
    for thread in threads:
        thread.join(timeout)
