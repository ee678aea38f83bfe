"""How a sender reaches its workers: connections, the arena for those on this machine, transports to the others.

Weights are packed once for all workers: into a slot of the arena, or into a private buffer if there is no arena. A
worker that has mapped the arena is pointed to the slot; every other worker is sent the same memory by its transport.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wsync.control.handshake import SenderSettings
from wsync.control.interfaces import ConnectionSource
from wsync.control.messages import Kind, Message
from wsync.control.workers import WorkerConnections
from wsync.deadlines import NOW
from wsync.fast_path import FastCalls
from wsync.sending.buffers import Buffers
from wsync.sending.general_update import GeneralUpdate
from wsync.sending.prepared import PreparedUpdates
from wsync.sending.queues import QueuedUpdate, check_extra
from wsync.sending.send_loop import SendLoop
from wsync.sending.slots import Slots
from wsync.sending.transfer_thread import join_all
from wsync.sending.transfers import Transfers
from wsync.shm.registered import RegisteredBuffers
from wsync.transforms.delta import Delta
from wsync.transport import TransportFactory
from wsync.types import Ack
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer
from wsync.weights.strategy import WeightStrategy

_GRACE = 2.0  # seconds for a thread that has nothing to wait for any more


class WorkerChannel:
    """The channel of one sender to its workers: ``FastChannel``, ``TransactionChannel`` and ``ConnectionCallbacks``.

    Used by the thread that calls the scheme, and by the thread of ``SendLoop``. ``_lock`` keeps their calls apart.

    Args:
        source: where workers connect.
        num_workers: the number of workers.
        create_transport: makes the transport of a worker that cannot use the arena; None if every worker must use it.
        strategy: the format of the weights that transports are given.
        arena: whether workers on this machine take weights from shared memory.
        retains: whether a worker's model stays bound to the slot that it was given.
        checksum: whether updates have a checksum; None: only those that a transport carries.
        device: where weights are packed if there is no arena.
        delta: makes the differences that transports' workers are sent; None: they are sent the full weights.
        on_request: whether workers fetch: they are sent an update when they request it.
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
        delta: Delta | None = None,
        on_request: bool = False,
    ) -> None:
        checksum = None if delta is not None and checksum is False else checksum  # it proves that the result is exact
        self._num_workers = num_workers
        self._strategy = strategy
        self._checksum = checksum
        self._delta = delta
        self._on_request = on_request
        retains = retains or on_request  # a worker may copy its slot at any time
        self._passes_descriptors = source.passes_descriptors
        self._lock = threading.RLock()
        self._connections = WorkerConnections(source, num_workers, self)
        self._layout: Layout | None = None
        self._slots = Slots(self._connections, num_workers, retains=retains, checksum=checksum) if arena else None
        self._buffers = Buffers(self._slots, device)
        self._transfers = Transfers(
            self._connections,
            num_workers,
            create_transport,
            self._in_format,
            checksum,
            None if delta is None else self._difference,
            on_request=on_request,
        )
        self._has_transports = create_transport is not None
        self._prepared = PreparedUpdates(self._connections, self._transfers, self._split)
        self._loop = SendLoop(self._connections, self._lock, self._must_read)
        self._closed = False

    @property
    def workers(self) -> Collection[int]:
        """See ``SendChannel``."""
        return self._connections.workers

    def _in_format(self, update: QueuedUpdate) -> Any:
        assert self._layout is not None, "set_layout() comes first"
        views = dict(zip(self._layout.names, update.buffer.views, strict=True))
        return self._strategy.extract_weights(views)

    def _must_read(self) -> bool:
        """Whether messages are to be read while the trainer does other work."""
        return self._transfers.unfinished or (self._on_request and bool(self.workers))

    def _difference(self, base: QueuedUpdate, update: QueuedUpdate) -> bytes | None:
        assert self._delta is not None and self._layout is not None, "set_layout() comes first"
        return self._delta.difference(base.buffer.flat, base.version, update.buffer.flat, self._layout.width)

    def _split(self, workers: Iterable[int]) -> tuple[list[int], list[int]]:
        """Return those of ``workers`` that get the version by a published word, and those that get it by a transport.

        For workers that are not connected the published word keeps the version, if there is an arena.
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
                self._connections.send(worker, Message(Kind.LAYOUT, worker, payload=self._settings(worker).dump()))

    def _settings(self, worker: int) -> SenderSettings:
        generation = self._transfers.queues[worker].generation
        handle = None if self._slots is None or self._passes_descriptors else self._slots.arena.handle
        return SenderSettings(
            self._layout, self._checksum, self._num_workers, generation, handle, self._delta is not None
        )

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
        """See ``ConnectionCallbacks``: the message names the version that the worker is given first."""
        queue = self._transfers.queues[worker]
        queue.generation += 1
        fds: tuple[int, ...] = ()
        if self._slots is None:
            if rejoined:
                queue.restart(queue.latest)
            first = queue.waiting[0] if queue.waiting else None
        else:
            first = self._slots.published(worker)
            if first is not None and rejoined:
                self._slots.point(worker, first.version, first.buffer.slot, acknowledge=True)
            if self._passes_descriptors:
                fds = self._slots.arena.fds
        return Message(Kind.ACCEPTED, worker, first.version if first else 0, self._settings(worker).dump(), fds=fds)

    def on_accepted(self, worker: int, deadline: float | None) -> None:
        """See ``ConnectionCallbacks``: find out whether the worker uses the arena; else set up its transport."""
        slots = self._slots
        if slots is not None and (self._passes_descriptors or slots.are_mapped(worker, deadline)):
            slots.workers.add(worker)
        elif worker in self.workers:
            if slots is not None:
                self._transfers.queues[worker].restart(slots.published(worker))
                slots.clear(worker)
            self._transfers.connect(worker, deadline)
        self._loop.connections_changed()
        self._loop.start_if_needed()

    def on_disconnected(self, worker: int) -> None:
        """See ``ConnectionCallbacks``: free what the worker used; keep the version that its replacement will get."""
        self._transfers.disconnect(worker)
        latest = self._transfers.queues[worker].latest
        if self._slots is not None:
            in_arena = worker in self._slots.workers
            self._slots.vacate(worker)
            if latest is not None and not in_arena:
                self._slots.point(worker, latest.version, latest.buffer.slot, acknowledge=False)

    def on_answer(self, worker: int, message: Message) -> None:
        """See ``ConnectionCallbacks``."""
        if message.kind is Kind.REQUEST:
            self._transfers.request(worker, message.version)
        elif self._slots is None or worker not in self._slots.workers:
            self._transfers.answered(worker, message.version, installed=message.kind is Kind.ACK)

    # --- buffers ---

    def reserve(self, workers: Collection[int], deadline: float | None, *, keep: bool = False) -> Buffer:
        """See ``TransactionChannel``."""
        with self._lock:
            assert self._layout is not None, "set_layout() comes first"
            busy = self._transfers.busy_slots | self._prepared.slots
            return self._buffers.reserve(self._layout, workers, busy, deadline, keep=keep)

    def release(self, buffers: Sequence[Buffer]) -> None:
        """See ``SendChannel``."""
        with self._lock:
            self._buffers.release(buffers)
            if buffers:
                self._buffers.set_newest(None)  # they may have been written in part

    def newest_views(self) -> Sequence[Tensor] | None:
        """See ``SendChannel``."""
        with self._lock:
            return self._buffers.newest_views()

    def carried_bytes(self, version: int) -> int:
        """See ``SendChannel``."""
        with self._lock:
            whole = self._layout.nbytes if self._layout else 0
            sent = 0 if self._slots is not None and self._slots.workers else self._transfers.carried_bytes(version)
            return sent or whole

    def share_registered(self, tensors: Mapping[str, Tensor]) -> RegisteredBuffers | None:
        """Tell the workers of the arena where registered buffers lie; None if they do not lie in shared memory."""
        return None if self._slots is None else RegisteredBuffers.share(self._slots.arena, tensors)

    def published_views(self) -> list[Sequence[Tensor]]:
        """Return each slot that workers are pointed to, as new tensors."""
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
            self._transfers.enqueue(QueuedUpdate(Kind.UPDATE, version, buffer, extra), others)
            self._buffers.release([buffer])
            self._buffers.set_newest(buffer if len(set(workers)) == self._num_workers else None)

    def _complete_buffer(self, buffer: Buffer, extra: bytes) -> None:
        if self._has_transports:
            check_extra(extra)
        if self._slots is not None:
            self._slots.complete(buffer, extra)

    def fast_calls(self, *, acknowledge: bool) -> FastCalls | None:
        """See ``FastChannel``."""
        if self._buffers.in_use or self._layout is None:
            return None
        if self._slots is not None and len(self._slots.workers) == self._num_workers:
            return self._slots.fast_calls(acknowledge=acknowledge)
        if not acknowledge:
            return None
        return GeneralUpdate(self, self._num_workers, self._connections.record).calls()

    # --- transactions ---

    def prepare(self, buffer: Buffer, version: int, extra: bytes, workers: Collection[int], transaction: int) -> None:
        """See ``TransactionChannel``."""
        with self._lock:
            self._complete_buffer(buffer, extra)
            self._buffers.set_newest(None)
            self._prepared.prepare(QueuedUpdate(Kind.PREPARE, version, buffer, extra, transaction), workers)

    def commit(self, transaction: int) -> None:
        """See ``TransactionChannel``."""
        with self._lock:
            buffers = self._prepared.commit(transaction, self._slots)
            if len(buffers) == self._num_workers and len({buffer.slot for buffer in buffers.values()}) == 1:
                self._buffers.set_newest(buffers[0])
            self._buffers.release(buffers.values())

    def abort(self, transaction: int) -> None:
        """See ``TransactionChannel``."""
        with self._lock:
            self._buffers.release(self._prepared.abort(transaction))

    # --- acknowledgements ---

    def drain(self) -> None:
        """See ``SendChannel``."""
        with self._lock:
            try:
                self._connections.drain()
            except BaseException:  # a signal handler raised: a message may be lost
                self._transfers.mark_overdue(self.workers)
                raise
            self._loop.start_if_needed()

    def wait_acks(self, workers: Collection[int], version: int, deadline: float | None) -> list[Ack]:
        """See ``SendChannel``."""
        with self._lock:
            if deadline == NOW:  # what has arrived; nothing is late
                return self._connections.wait_acks(workers, version, deadline)
            answered: set[int] = set()
            try:
                acks = self._connections.wait_acks(workers, version, deadline)
                answered.update(ack.worker for ack in acks)
                if len(answered) < len(workers):
                    self._transfers.give_up(set(workers) - answered)
                return acks
            finally:  # also if a signal handler raised: a message may be lost
                self._transfers.mark_overdue(set(workers) - answered)

    def close(self, *, finished: bool = False) -> None:
        """See ``SendChannel``."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.stop()
            slots, self._slots = self._slots, None  # first: disconnecting must not write words in a forked child
            self._connections.close(finished=finished)
            self._buffers.clear()
            self._transfers.close()
            if slots is not None:
                slots.arena.close()
        self._loop.close()
        join_all(self._transfers.ending, _GRACE)
