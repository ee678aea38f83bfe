"""The transports of the workers that do not use the arena: set up, given updates, closed."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Sequence

from wsync.control import Connection
from wsync.control.messages import Kind, Message
from wsync.control.workers import WorkerConnections
from wsync.deadlines import deadline_in
from wsync.errors import NotConnected, SyncTimeout, WorkerFailed
from wsync.sending.deliveries import FlatDelivery
from wsync.sending.queued_update import QueuedUpdate
from wsync.sending.queues import WorkerQueue
from wsync.sending.transfer_thread import TransferThread
from wsync.transport import FlatTransport, TransportBackend, TransportFactory, require_transport
from wsync.transport_setup import TransportSetup, close_transport

_GRACE = 0.5  # seconds in which the death of a worker is noticed after its transport has failed


def inline_bytes(transport: TransportBackend | FlatTransport, connection: Connection) -> int:
    """Return how many bytes the payload of an ``UPDATE_WITH_WEIGHTS`` may have: the socket must take it at once.

    If a thread had to send the rest, a trainer that is stopped meanwhile would leave half a message.
    """
    return min(transport.inline_bytes, connection.room_when_empty) if isinstance(transport, FlatTransport) else 0


class Transfers:
    """The queues of all workers, and their transports. All methods are called under the channel's lock.

    Args:
        connections: the connections to all workers.
        queues: by worker; kept as an attribute.
        create_transport: the scheme's; None if every worker must use the arena: no update is then sent here.

    Attributes:
        ending: threads that end soon: of closed transports, and of set-ups that have failed.
    """

    def __init__(
        self,
        connections: WorkerConnections,
        queues: Sequence[WorkerQueue],
        create_transport: TransportFactory | None,
    ) -> None:
        self.queues = queues
        self.ending: list[threading.Thread] = []
        self._connections = connections
        self._create_transport = create_transport
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._noticing_deaths = False
        # Slots that a transfer to a former worker may still read, until its thread has ended; for ever without one.
        self._abandoned: list[tuple[threading.Thread | None, int]] = []
        connections.watch(self._wake, self._calls_ended)

    @property
    def busy_slots(self) -> set[int]:
        """The slots of buffers that must not be written."""
        self._abandoned = [(thread, slot) for thread, slot in self._abandoned if thread is None or thread.is_alive()]
        abandoned = {slot for _, slot in self._abandoned}
        return abandoned.union(update.buffer.slot for queue in self.queues for update in queue.updates)

    @property
    def unfinished(self) -> bool:
        """Whether an update waits for a connected worker, or for its transfer thread."""
        return any(queue.unfinished for queue in self.queues)

    # --- connections ---

    def connect(self, worker: int, deadline: float | None) -> None:
        """Set up the transport of a worker that has connected, and send the update that waits for it.

        Raises:
            SyncTimeout, WorkerFailed: it was not set up in time, or raised an error; the worker is disconnected.
            Exception: whatever ``create_transport`` raised; the worker is disconnected.
        """
        queue = self.queues[worker]
        if self._create_transport is None:
            return  # the worker must use the arena; it could not, and disconnects (``ReaderFactory.open``)
        try:
            transport = require_transport(self._create_transport(worker))
        except BaseException:  # without a transport, it would wait for updates that are never sent
            self._connections.disconnect(worker)
            raise
        try:
            with self._connections.reading_directly(worker) as connection:
                queue.inline_bytes = inline_bytes(transport, connection)
                setup = TransportSetup(connection, worker, deadline, transport, 0, queue.connection_number)
                try:
                    unread = setup.wait()
                    queue.transport = self._sending_end(transport)
                finally:
                    self._keep(setup.thread)
        except NotConnected as error:
            self._connections.mark_dead(worker, str(error))
            return
        except Exception as error:
            reason = f"the set-up of its transport failed there: {error}".encode(errors="backslashreplace")
            self._connections.send(worker, Message(Kind.LEAVE, worker, payload=reason))
            self._connections.disconnect(worker)
            if isinstance(error, SyncTimeout):
                raise SyncTimeout(str(error), {worker: str(error)}) from error
            cause = f"the set-up of its transport raised {type(error).__name__}: {error}"
            raise WorkerFailed(f"worker {worker}: {cause}", {worker: cause}, failed=[worker]) from error
        queue.advance()
        for message in unread:
            self._connections.process(worker, message)

    def _sending_end(self, transport: TransportBackend | FlatTransport) -> FlatTransport | TransferThread:
        """Return what a queue sends with; close ``transport`` if there is no descriptor or thread left for it."""
        if isinstance(transport, FlatTransport):
            return transport
        try:
            return TransferThread(transport, self._wake)
        except BaseException:
            close_transport(transport)
            raise

    def disconnect(self, worker: int) -> None:
        """Close the transport of a worker that has gone, and drop its updates but the latest."""
        queue = self.queues[worker]
        transport, current = queue.transport, queue.current
        queue.transport = None
        queue.restart(None)
        if isinstance(transport, TransferThread):
            thread = transport.close()
            if transport.busy and current is not None:
                self._abandoned.append((thread, current.update.buffer.slot))  # send_weights may still read it
            self._keep(thread)
        elif transport is not None:
            pending = current.pending if isinstance(current, FlatDelivery) else None
            if close_transport(transport, pending) and current is not None:
                self._abandoned.append((None, current.update.buffer.slot))

    def _keep(self, thread: threading.Thread) -> None:
        """Add a thread to ``ending``, and drop those that have ended."""
        self.ending = [one for one in (*self.ending, thread) if one.is_alive()]

    # --- updates ---

    def enqueue(self, update: QueuedUpdate, workers: Collection[int]) -> None:
        """Send an update to workers that are ready for it; the others get it, or a newer one, later.

        Where transports receive ahead, the data is sent to all workers before it is announced: a worker that has begun
        to receive then wakes once, not once for the message and again for the data.
        """
        for worker in workers:
            self.queues[worker].append(update)
        for worker in workers:
            self.queues[worker].advance()

    def carried_bytes(self, version: int) -> int:
        """Return the most bytes of weights that a worker was sent for the newest ``version``; 0 if none was."""
        latest = [queue.latest for queue in self.queues if queue.latest is not None]
        return max((update.carried for update in latest if update.version == version), default=0)

    def _calls_ended(self) -> None:
        try:
            os.eventfd_read(self._wake)
            for queue in self.queues:
                queue.call_ended()
            self._report_failures()
        except BaseException:  # a signal handler raised: look again
            os.eventfd_write(self._wake, 1)
            raise

    def _report_failures(self) -> None:
        """Report failed calls, unless a worker's death explains them, which its connection may tell a moment later.

        Calls that fail during this wait are reported with the others, after one wait for all.
        """
        if self._noticing_deaths:
            return
        self._noticing_deaths, deadline = True, deadline_in(_GRACE)
        try:
            while any(queue.failure is not None for queue in self.queues) and self._connections.read(deadline):
                pass
        finally:
            self._noticing_deaths = False
            for queue in self.queues:
                queue.report_failure()

    def disconnect_unfinished(self, workers: Collection[int]) -> None:
        """Called at an update's deadline: disconnect those of ``workers`` with ``send_weights`` still running.

        The others stay connected. ``mark_overdue`` follows.
        """
        for worker in workers:
            if self.queues[worker].is_sending:
                self._connections.mark_dead(worker, "its transport's send_weights did not return in time")

    def mark_overdue(self, workers: Collection[int]) -> None:
        """Record that answers of ``workers`` are late, or may have been lost: the next update requests them again."""
        for worker in workers:
            queue = self.queues[worker]
            queue.overdue = queue.current is not None

    def end_in_forked_child(self) -> None:
        """Leave transports and threads to the parent: ``disconnect`` closes none of them in this process."""
        self._inherited = [queue.transport for queue in self.queues]  # kept: their finalizers must not run here
        for queue in self.queues:
            queue.transport = None
        self.ending = []

    def close(self) -> None:
        """Release the rest. Called after the workers were disconnected. Idempotent."""
        wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)
