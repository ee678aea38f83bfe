"""The trainer's side of the way to all workers: connections, the arena on this machine, transports to others.

Weights are packed once for all workers: into a slot of the arena, or into a private buffer where there is no arena. A
worker that has mapped the arena is told which slot to use; every other worker is sent the same buffer by its transport.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wsync.control.handshake import SenderSettings
from wsync.control.interfaces import ConnectionSource
from wsync.control.messages import Kind, Message
from wsync.control.workers import WorkerConnections
from wsync.deadlines import wait_readable
from wsync.errors import SyncTimeout
from wsync.fast_path import FastCalls, PartialDelivery
from wsync.sending.queues import BufferPool, QueuedUpdate, check_extra_size
from wsync.sending.send_loop import SendLoop
from wsync.sending.slots import Slots
from wsync.sending.transfers import Transfers, join_all
from wsync.shm.arena import PREPARE
from wsync.shm.registered import RegisteredBuffers
from wsync.transport import TransportFactory
from wsync.types import Ack
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer
from wsync.weights.strategy import WeightStrategy

_GRACE = 2.0  # seconds for a thread that has nothing to wait for any more


class WorkerChannel:
    """See the module; a ``SendChannel``. Implements ``ConnectionCallbacks``.

    Args:
        source: where workers connect.
        num_workers: how many there are.
        create_transport: makes the transport of a worker that cannot use the arena; None: every worker must use it.
        strategy: the format in which transports are given weights.
        arena: whether workers on this machine take weights from shared memory.
        retains: whether a worker's model stays bound to the slot that it was given.
        checksum: whether updates carry a checksum; None: those that a transport carries.
        device: where weights are packed, without an arena.
    """

    def __init__(
        self,
        source: ConnectionSource,
        num_workers: int,
        create_transport: TransportFactory | None,
        strategy: WeightStrategy,
        *,
        arena: bool,
        retains: bool,
        checksum: bool | None,
        device: torch.device,
    ) -> None:
        self._num_workers = num_workers
        self._strategy = strategy
        self._retains = retains
        self._checksum = checksum
        self._passes_descriptors = source.passes_descriptors
        self._lock = threading.RLock()
        self._connections = WorkerConnections(source, num_workers, self)
        self._layout: Layout | None = None
        self._pool = BufferPool(device)
        self._slots = Slots(self._connections, num_workers, retains=retains, checksum=checksum) if arena else None
        self._transfers = (
            None
            if create_transport is None
            else Transfers(self._connections, num_workers, create_transport, self._express, checksum)
        )
        self._reserved: set[int] = set()
        self._prepared: dict[int, dict[int, QueuedUpdate]] = {}  # by transaction, then worker
        self._loop = SendLoop(self._connections, self._lock, self._work_is_left)
        self._closed = False

    @property
    def workers(self) -> Collection[int]:
        """See ``SendChannel``."""
        return self._connections.workers

    def _express(self, update: QueuedUpdate) -> Any:
        assert self._layout is not None, "set_layout() comes first"
        views = dict(zip(self._layout.names, update.buffer.views, strict=True))
        return self._strategy.extract_weights(views)

    def _work_is_left(self) -> bool:
        return self._transfers is not None and self._transfers.unfinished

    def _split(self, workers: Collection[int]) -> tuple[list[int], list[int]]:
        """Return those of ``workers`` that have their published words stored, and those that have a transport.

        Of workers that are not connected, the version is kept in the arena, if there is one.
        """
        if self._slots is None:
            return [], list(workers)
        in_arena = [worker for worker in workers if worker in self._slots.workers or worker not in self.workers]
        return in_arena, [worker for worker in workers if worker not in in_arena]

    def check_layout(self, layout: Layout, version: int) -> None:
        """See ``SendChannel``."""
        payload = SenderSettings(layout, self._checksum, self._num_workers).dump()
        with self._lock:
            for worker in self.workers:
                self._connections.send(worker, Message(Kind.CHECK_LAYOUT, worker, version, payload))

    def set_layout(self, layout: Layout) -> None:
        """See ``SendChannel``."""
        with self._lock:
            self._layout = layout
            if self._slots is not None:
                self._slots.set_layout(layout)
            for worker in self.workers:
                self._connections.send(worker, Message(Kind.LAYOUT, worker, payload=self._handshake(worker).dump()))

    def _handshake(self, worker: int) -> SenderSettings:
        generation = 0 if self._transfers is None else self._transfers.queues[worker].generation
        handle = None if self._slots is None or self._passes_descriptors else self._slots.arena.handle
        return SenderSettings(self._layout, self._checksum, self._num_workers, generation, handle)

    def wait_for_workers(self, workers: Collection[int], sentinels: Mapping[int, int], deadline: float | None) -> None:
        """See ``SendChannel``."""
        with self._lock:
            self._connections.wait_for_workers(workers, sentinels, deadline)

    def disconnect(self, worker: int) -> None:
        """See ``SendChannel``."""
        with self._lock:
            self._connections.disconnect(worker)

    # --- ConnectionCallbacks ---

    def accept_message(self, worker: int, rejoined: bool) -> Message:
        """See ``ConnectionCallbacks``: the message names the version that the worker gets as it joins."""
        first: QueuedUpdate | None = None
        if self._transfers is not None:
            queue = self._transfers.queues[worker]
            queue.generation += 1
            if self._slots is None:
                if rejoined:
                    self._transfers.rejoin(worker)
                first = queue.waiting[0] if queue.waiting else None
        if self._slots is not None:
            first = self._slots.published(worker)
            if first is not None and rejoined:
                self._slots.point(worker, first.version, first.buffer.slot, acknowledge=True)
        fds = self._slots.arena.fds if self._slots is not None and self._passes_descriptors else ()
        return Message(Kind.ACCEPTED, worker, first.version if first else 0, self._handshake(worker).dump(), fds=fds)

    def on_accepted(self, worker: int, deadline: float | None) -> None:
        """See ``ConnectionCallbacks``: find out whether the worker uses the arena; else set up its transport."""
        if self._slots is not None and (self._passes_descriptors or self._has_mapped(worker, deadline)):
            self._slots.workers.add(worker)
        elif worker in self.workers and self._transfers is not None:
            if self._slots is not None:
                first = self._slots.published(worker)
                self._slots.clear(worker)
                self._transfers.queues[worker].clear()
                if first is not None:
                    self._transfers.queues[worker].append(first)
            self._transfers.connect(worker, deadline)
        self._loop.connections_changed()

    def _has_mapped(self, worker: int, deadline: float | None) -> bool:
        """Wait until the worker has tried to map the arena; False if it could not, or has gone."""
        with self._connections.reading_directly(worker) as connection:
            ready = wait_readable(connection.descriptors, deadline)
            if not ready:
                self._connections.disconnect(worker)
                cause = "was accepted, but did not answer"
                raise SyncTimeout(f"worker {worker} {cause}: is it stopped?", {worker: cause})
            message = connection.receive() if connection.fileno() in ready else None
        if message is None or message.kind is not Kind.JOINED:
            self._connections.mark_dead(worker, f"{connection.peer} left while it was joining")
            return False
        return message.version == 1

    def on_disconnected(self, worker: int) -> None:
        """See ``ConnectionCallbacks``: free what the worker used; keep what a worker in its place will be given."""
        latest = None
        if self._transfers is not None:
            self._transfers.disconnect(worker)
            latest = self._transfers.queues[worker].latest
        if self._slots is not None:
            in_arena = worker in self._slots.workers
            self._slots.vacate(worker)
            if latest is not None and not in_arena:
                self._slots.point(worker, latest.version, latest.buffer.slot, acknowledge=False)

    def on_answer(self, worker: int, message: Message) -> None:
        """See ``ConnectionCallbacks``."""
        if self._transfers is not None and (self._slots is None or worker not in self._slots.workers):
            self._transfers.answered(worker, message.version)

    # --- buffers ---

    def reserve(self, workers: Collection[int], deadline: float | None, *, keep: bool = False) -> Buffer:
        """See ``SendChannel``."""
        with self._lock:
            assert self._layout is not None, "set_layout() comes first"
            busy = self._reserved | (set() if self._transfers is None else self._transfers.busy_slots)
            busy.update(update.buffer.slot for updates in self._prepared.values() for update in updates.values())
            if self._slots is None:
                buffer = self._pool.buffer(self._layout, busy)
            else:
                buffer = self._slots.reserve(workers, busy, deadline, keep=keep)
            self._reserved.add(buffer.slot)
            return buffer

    def release(self, buffers: Sequence[Buffer]) -> None:
        """See ``SendChannel``."""
        with self._lock:
            self._reserved.difference_update(buffer.slot for buffer in buffers)

    def share_registered(self, tensors: Mapping[str, Tensor]) -> RegisteredBuffers | None:
        """Tell the workers of the arena where registered buffers lie; None if they do not lie in shared memory."""
        return None if self._slots is None else RegisteredBuffers.share(self._slots.arena, tensors)

    def published_views(self) -> list[Sequence[Tensor]]:
        """Return the slots that workers are pointed to, each once, as tensors of the caller's own."""
        return [] if self._slots is None else self._slots.published_views()

    # --- updates ---

    def publish(self, buffer: Buffer, version: int, extra: bytes, workers: Collection[int], acknowledge: bool) -> None:
        """See ``SendChannel``."""
        with self._lock:
            self._complete_buffer(buffer, extra)
            in_arena, others = self._split(workers)
            for worker in in_arena:
                assert self._slots is not None, "some workers use it"
                self._slots.point(worker, version, buffer.slot, acknowledge)
            if self._transfers is not None:
                self._transfers.enqueue(QueuedUpdate(Kind.UPDATE, version, buffer, extra), others)
            self._reserved.discard(buffer.slot)

    def _complete_buffer(self, buffer: Buffer, extra: bytes) -> None:
        if self._transfers is not None:
            check_extra_size(extra)
        if self._slots is not None:
            self._slots.complete(buffer, extra)

    def fast_calls(self, *, acknowledge: bool) -> FastCalls | None:
        """See ``SendChannel``."""
        slots, descriptors = self._slots, self._connections.descriptors
        if slots is None or self._checksum or self._reserved or not descriptors:
            return None
        if len(slots.workers) < self._num_workers:
            return None
        update = slots.arena.fast_update(descriptors, self._retains, acknowledge)
        return None if update is None else FastCalls(update, partial(self._finish_fast, slots, acknowledge))

    def _finish_fast(self, slots: Slots, acknowledge: bool, delivery: PartialDelivery, version: int) -> None:
        """Point the workers that the fast call could not, and record the acknowledgements that it has read."""
        for worker in delivery.others:
            slots.point(worker, version, delivery.slot, acknowledge)
        for worker, answered in enumerate(delivery.answered):
            if answered:
                self._connections.record(Ack(worker, version))

    # --- transactions ---

    def prepare(self, buffer: Buffer, version: int, extra: bytes, workers: Collection[int], transaction: int) -> None:
        """See ``SendChannel``."""
        with self._lock:
            self._complete_buffer(buffer, extra)
            update = QueuedUpdate(Kind.PREPARE, version, buffer, extra, transaction)
            self._prepared.setdefault(transaction, {}).update(dict.fromkeys(workers, update))
            in_arena, others = self._split(workers)
            place = PREPARE.pack(transaction, buffer.slot)
            for worker in in_arena:
                self._connections.send(worker, Message(Kind.PREPARE, worker, version, place))
            if self._transfers is not None:
                self._transfers.enqueue(update, [worker for worker in others if worker in self.workers])

    def commit(self, version: int, transaction: int) -> None:
        """See ``SendChannel``. In the arena the published word is the commit, for all models of the transaction."""
        with self._lock:
            prepared = self._prepared.pop(transaction)
            in_arena, others = self._split(prepared)
            for worker in in_arena:
                assert self._slots is not None, "some workers use it"
                self._slots.point(worker, version, prepared[worker].buffer.slot, acknowledge=True)
            for worker in others if self._transfers is not None else ():
                self._transfers.commit(worker, prepared[worker])  # pyright: ignore[reportOptionalMemberAccess]
            self._reserved.difference_update(update.buffer.slot for update in prepared.values())

    def abort(self, workers: Collection[int], transaction: int) -> None:
        """See ``SendChannel``."""
        with self._lock:
            prepared = self._prepared.pop(transaction, {})
            in_arena, others = self._split(workers)
            for worker in in_arena:  # may be dropped: what is not committed is not installed
                self._connections.notify(worker, Message(Kind.ABORT, worker, transaction))
            for worker in others if self._transfers is not None and prepared else ():
                self._transfers.abort(worker, transaction)  # pyright: ignore[reportOptionalMemberAccess]
            self._reserved.difference_update(update.buffer.slot for update in prepared.values())

    # --- acknowledgements ---

    def drain(self) -> None:
        """See ``SendChannel``."""
        with self._lock:
            try:
                self._connections.drain()
            except BaseException:  # a signal handler raised: what was being read is lost
                self._mark_overdue(self.workers)
                raise
            self._loop.start_if_needed()

    def wait_acks(self, workers: Collection[int], version: int, deadline: float | None) -> list[Ack]:
        """See ``SendChannel``."""
        with self._lock:
            heard: set[int] = set()
            try:
                acks = self._connections.wait_acks(workers, version, deadline)
                heard.update(ack.worker for ack in acks)
                if self._transfers is not None and len(heard) < len(workers):
                    self._transfers.give_up(set(workers) - heard)
                return acks
            finally:  # also where a signal handler raised: what was being read is lost
                self._mark_overdue(set(workers) - heard)

    def _mark_overdue(self, workers: Collection[int]) -> None:
        if self._transfers is not None:
            for worker in workers:
                queue = self._transfers.queues[worker]
                queue.overdue = queue.current is not None

    def close(self) -> None:
        """See ``SendChannel``."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.stop()
            slots, self._slots = self._slots, None  # first: a forked child that closes must not touch workers' words
            self._connections.close()
            self._pool.clear()
            if self._transfers is not None:
                self._transfers.close()
            if slots is not None:
                slots.arena.close()
        self._loop.close()
        if self._transfers is not None:
            join_all(self._transfers.ending, _GRACE)
