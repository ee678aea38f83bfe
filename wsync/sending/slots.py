"""The arena in the sender's process: which slot may be written, and pointing workers to slots."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from wsync.control.messages import Kind, Message
from wsync.control.workers import WorkerConnections
from wsync.deadlines import remaining, wait_readable
from wsync.errors import SyncTimeout, join_indices
from wsync.fast_path import FastCalls, UnfinishedUpdate
from wsync.sending.queued_update import QueuedUpdate
from wsync.shm.arena import SenderArena
from wsync.types import Ack
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer

_MUTEX_TIMEOUT = 5.0  # seconds; a worker holds its mutex for a microsecond, unless it was stopped inside


class Slots:
    """The slots of one sender's arena. All methods are called under the channel's lock.

    The published word of a worker that is not connected names the version for its replacement, even if the replacement
    will use a transport.

    Args:
        connections: the connections to all workers.
        num_workers: the number of workers.
        spare: slots besides those that are published and held: one to write, and others that may still be in use.
        checksum: see ``SenderSettings``; only if True, updates in the arena have one.

    Attributes:
        arena: the slots.
        workers: the connected workers that use the arena.
    """

    def __init__(self, connections: WorkerConnections, num_workers: int, *, spare: int, checksum: bool | None) -> None:
        self.arena = SenderArena(num_workers)
        self.workers: set[int] = set()
        self._connections = connections
        self._spare = spare
        self._checksum = checksum

    def set_layout(self, layout: Layout) -> None:
        """Define what a slot contains, and allocate the first slots."""
        self.arena.set_layout(layout)
        for _ in range(2):  # of the first two versions
            self.arena.grow()

    def reserve(self, busy: set[int], deadline: float | None) -> Buffer:
        """Return a slot that no published word names, that no forward uses, and that is not in ``busy``.

        Raises:
            SyncTimeout: there was none before ``deadline``; names the workers that use them.
        """
        arena = self.arena
        while True:
            published, used, held = arena.writer.occupied()
            kept = published | held | busy
            slot = next((slot for slot in range(len(arena.plans)) if slot not in kept | used), None)
            if slot is None and len(arena.plans) < len(kept) + self._spare:
                slot = arena.grow()
            if slot is not None:
                arena.writer.set_slot_version(slot, 0)
                return arena.buffer(slot)
            self._wait_for_slot(deadline)

    def _wait_for_slot(self, deadline: float | None) -> None:
        """Wait until one of the forwards that use all slots has ended, or its worker has died."""
        blocking = [worker for worker in sorted(self.workers) if self._is_blocking(worker, remaining(deadline))]
        if blocking and not self._connections.read(deadline):
            raise SyncTimeout(
                f"no slot came free in time: worker(s) {join_indices(blocking)} are still inside a forward, or stopped",
                {worker: "holds its weights in a forward that does not end" for worker in blocking},
            )

    def _is_blocking(self, worker: int, timeout: float | None) -> bool:
        """Have a worker send a message once it frees its slot; whether it uses one now."""
        try:
            return self.arena.writer.await_free(worker, timeout)
        except SyncTimeout as error:
            raise SyncTimeout(f"worker {worker}: {error}", {worker: str(error)}) from error

    def store_extra_and_checksum(self, buffer: Buffer, extra: bytes) -> None:
        """Store what belongs to the weights that were packed into a slot, for the workers that read it."""
        self.arena.write_extra(buffer.slot, extra)
        if self._checksum:
            self.arena.write_checksum(buffer.slot, extra)

    def point(self, worker: int, version: int, slot: int, acknowledge: bool) -> None:
        """Store a worker's published word, and wake the worker if it has to be."""
        self.arena.writer.set_slot_version(slot, version)
        try:
            wake = self.arena.writer.publish(worker, version, slot, acknowledge, _MUTEX_TIMEOUT)
        except SyncTimeout as error:
            self._connections.store(Ack(worker, version, error=f"could not be pointed to the update: {error}"))
            return
        if acknowledge or wake:
            self._connections.send(worker, Message(Kind.UPDATE, worker, version), may_drop=True)

    def published(self, worker: int) -> QueuedUpdate | None:
        """Return the version that a worker's published word names; None if there is none."""
        version, slot = self.arena.writer.published(worker)
        if not version:
            return None
        return QueuedUpdate(Kind.UPDATE, version, self.arena.buffer(slot), self.arena.read_extra(slot))

    def clear(self, worker: int) -> None:
        """Reset a worker's words: it is pointed to no slot and uses none."""
        self.vacate(worker)
        self.arena.writer.publish(worker, 0, 0, False, _MUTEX_TIMEOUT)

    def vacate(self, worker: int) -> None:
        """Record that a worker that has gone uses no slot; its published word stays, for its replacement."""
        self.workers.discard(worker)
        self.arena.writer.vacate(worker, _MUTEX_TIMEOUT)

    def are_mapped(self, worker: int, deadline: float | None) -> bool:
        """Wait until an accepted worker has tried to map the arena; False if it could not, or has disconnected.

        Raises:
            SyncTimeout: it did not answer; it is disconnected.
        """
        with self._connections.reading_directly(worker) as connection:
            ready = wait_readable(connection.descriptors, deadline)
            message = connection.receive() if connection.fileno() in ready else None
        if not ready:
            self._connections.disconnect(worker)
            cause = "was accepted, but did not answer"
            raise SyncTimeout(f"worker {worker} {cause}: is it stopped?", {worker: cause})
        if message is None or message.kind is not Kind.ROUTE:
            self._connections.mark_dead(worker, f"{connection.peer_name} left while it was joining")
            return False
        return message.version == 1  # see ``Kind.ROUTE``

    def fast_calls(self, *, acknowledge: bool) -> FastCalls | None:
        """See ``SenderSideChannel``. All workers use the arena; None if updates have a checksum."""
        if self._checksum:
            return None
        descriptors = self._connections.fast_path_descriptors
        if not descriptors:
            return None
        update = self.arena.writer.fast_update(self.arena.plans, self.arena.layout.nbytes, descriptors, acknowledge)
        return None if update is None else FastCalls(update, partial(self._finish_publishing, acknowledge))

    def _finish_publishing(self, acknowledge: bool, unfinished: UnfinishedUpdate, version: int) -> None:
        """Point the workers that the fast call could not, and record the acknowledgements that it has read."""
        for worker in unfinished.others:
            self.point(worker, version, unfinished.slot, acknowledge)
        for worker, answered in enumerate(unfinished.answered):
            if answered:
                self._connections.store(Ack(worker, version))

    def published_views(self) -> list[Sequence[Tensor]]:
        """Return each slot that workers are pointed to, as new tensors."""
        return [self.arena.map_slot(slot).views for slot in self.arena.published_slots()]
