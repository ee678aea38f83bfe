"""How each worker gets its updates: it reads them in the arena, or a transport sends them to it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from wsync.control import Listener
from wsync.control.messages import Kind, Message
from wsync.control.settings import SenderSettings
from wsync.control.workers import WorkerConnections
from wsync.sending.queued_update import QueuedUpdate, check_extra
from wsync.sending.queues import WorkerQueue
from wsync.sending.slots import Slots
from wsync.sending.transfers import Transfers
from wsync.shm.arena import PREPARE_PAYLOAD
from wsync.transforms.delta import Delta
from wsync.transport import TransportFactory
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer
from wsync.weights.strategy import WeightStrategy


class Routes:
    """Chooses one of the two ways for each worker that connects, and delivers updates by it.

    Implements ``ConnectionCallbacks``. All methods are called under the channel's lock.

    Args:
        listener: where workers connect.
        num_workers: the number of workers.
        create_transport: makes the transport of a worker that cannot use the arena; None if every worker must use it.
        strategy: the format of the weights that transports are given.
        arena: whether workers on this machine take weights from shared memory.
        binds_arena: whether the model of a worker stays bound to the slot that it was given.
        checksum: see ``SenderSettings``.
        delta: computes the differences that transports send instead of the full weights; None: they send the latter.
        on_request: with ``initiator="receiver"``: workers are sent an update when they request it.

    Attributes:
        connections: the connections to all workers.
        slots: the slots of the arena; None if there is none.
        transfers: the transfers to the workers that do not use the arena.
        layout: the layout of the weights; None before the first.
    """

    def __init__(
        self,
        listener: Listener,
        num_workers: int,
        create_transport: TransportFactory | None,
        strategy: WeightStrategy,
        *,
        arena: bool,
        binds_arena: bool,
        checksum: bool | None,
        delta: Delta | None,
        on_request: bool,
    ) -> None:
        if delta is not None and checksum is False:
            checksum = None  # weights that are made from a difference are always verified
        self.num_workers = num_workers
        self.layout: Layout | None = None
        self._strategy = strategy
        self._checksum = checksum
        self._delta = delta
        self._on_request = on_request
        self._has_transports = create_transport is not None
        self._passes_descriptors = listener.passes_descriptors
        connections = self.connections = WorkerConnections(listener, num_workers, self)
        # With on_request, a worker may still be copying an older slot while the newest is published: one slot more.
        spare = 2 if binds_arena or on_request else 1
        self.slots = Slots(connections, num_workers, spare=spare, checksum=checksum) if arena else None
        functions = self._weights_for_transport, None if delta is None else self._difference
        queues = [
            WorkerQueue(worker, connections, *functions, checksum=checksum, on_request=on_request)
            for worker in range(num_workers)
        ]
        self.transfers = Transfers(connections, queues, create_transport)

    def _weights_for_transport(self, update: QueuedUpdate) -> Any:
        assert self.layout is not None, "set_layout() comes first"
        views = dict(zip(self.layout.names, update.buffer.views, strict=True))
        return self._strategy.extract_weights(views)

    def _difference(self, base: QueuedUpdate, update: QueuedUpdate) -> bytes | None:
        assert self._delta is not None and self.layout is not None, "set_layout() comes first"
        return self._delta.difference(base.buffer.flat, base.version, update.buffer.flat, self.layout.width)

    def needs_send_loop(self) -> bool:
        """Return whether messages have to be read while the trainer does other work."""
        return self.transfers.unfinished or (self._on_request and bool(self.connections.workers))

    def _split(self, workers: Iterable[int]) -> tuple[list[int], list[int]]:
        """Return those of ``workers`` that get the version by a published word, and those that get it by a transport.

        A worker that is not connected counts as one of the arena, if there is one: its published word keeps the version
        for its replacement.
        """
        if self.slots is None:
            return [], list(workers)
        connected = self.connections.workers
        in_arena, others = [], []
        for worker in workers:
            (in_arena if worker in self.slots.workers or worker not in connected else others).append(worker)
        return in_arena, others

    # --- layout ---

    def check_layout(self, layout: Layout, version: int) -> None:
        """See ``SendChannel``."""
        payload = SenderSettings(layout, self._checksum, self.num_workers).dump()
        for worker in self.connections.workers:
            self.connections.send(worker, Message(Kind.CHECK_LAYOUT, worker, version, payload))

    def set_layout(self, layout: Layout) -> None:
        """See ``SendChannel``."""
        if self.slots is not None:
            self.slots.set_layout(layout)  # first: there may be no memory for its slots
        self.layout = layout
        for worker in self.connections.workers:
            self.connections.send(worker, Message(Kind.LAYOUT, worker, payload=self._settings(worker).dump()))

    def _settings(self, worker: int) -> SenderSettings:
        connection_number = self.transfers.queues[worker].connection_number
        handle = None if self.slots is None or self._passes_descriptors else self.slots.arena.handle
        has_delta = self._delta is not None
        return SenderSettings(self.layout, self._checksum, self.num_workers, connection_number, handle, has_delta)

    # --- ConnectionCallbacks ---

    def accepted_message(self, worker: int, rejoined: bool) -> Message:
        """See ``ConnectionCallbacks``: the message names the version that the worker is given first."""
        queue = self.transfers.queues[worker]
        queue.connection_number += 1
        fds: tuple[int, ...] = ()
        if self.slots is None:
            # `rejoined` is false if the former worker was lost before ACCEPTED was sent; its update is then not queued.
            if rejoined or (queue.latest is not None and not queue.waiting):
                queue.restart(queue.latest)
            first = queue.waiting[0] if queue.waiting else None
        else:
            self.slots.arena.writer.accept(worker, queue.connection_number)
            first = self.slots.published(worker)
            if first is not None and rejoined:
                self.slots.point(worker, first.version, first.buffer.slot, acknowledge=True)
            if self._passes_descriptors:
                fds = self.slots.arena.fds
        return Message(Kind.ACCEPTED, worker, first.version if first else 0, self._settings(worker).dump(), fds=fds)

    def on_accepted(self, worker: int, deadline: float | None) -> None:
        """See ``ConnectionCallbacks``: find out whether the worker uses the arena; else set up its transport."""
        slots = self.slots
        if slots is not None and (self._passes_descriptors or slots.are_mapped(worker, deadline)):
            slots.workers.add(worker)
        elif worker in self.connections.workers:
            if slots is not None:
                self.transfers.queues[worker].restart(slots.published(worker))
                slots.clear(worker)
            self.transfers.connect(worker, deadline)

    def on_disconnected(self, worker: int) -> None:
        """See ``ConnectionCallbacks``: free what the worker used; keep the version that its replacement will get."""
        self.transfers.disconnect(worker)
        if self.slots is not None:
            self.slots.vacate(worker)
            self._move_to_word(worker)

    def _move_to_word(self, worker: int) -> None:
        """Have the published word of a worker that is not connected name what its queue has, for its replacement."""
        queue = self.transfers.queues[worker]
        queue.restart(None)
        latest, queue.latest = queue.latest, None  # None, too, if the worker has used the arena
        if latest is not None and self.slots is not None:
            self.slots.point(worker, latest.version, latest.buffer.slot, acknowledge=False)

    def on_message(self, worker: int, message: Message) -> None:
        """See ``ConnectionCallbacks``."""
        queue = self.transfers.queues[worker]
        if message.kind is Kind.REQUEST:
            queue.request(message.version)
        elif self.slots is None or worker not in self.slots.workers:
            queue.answered(message.version, installed=message.kind is Kind.ACK)

    # --- updates ---

    def store_extra_and_checksum(self, update: QueuedUpdate) -> None:
        """Store what belongs to the weights of an update, next to them in the arena. Called once, before it is sent.

        Raises:
            WeightSyncError: the extra state is too large, or the machine has no memory left for it.
        """
        if self._has_transports:
            check_extra(update.extra)
        if self.slots is not None:
            self.slots.store_extra_and_checksum(update.buffer, update.extra)

    def publish(self, update: QueuedUpdate, workers: Collection[int], acknowledge: bool) -> None:
        """Make an update the newest of ``workers``; that of absent ones is kept for their replacements."""
        in_arena, others = self._split(workers)
        self._point(dict.fromkeys(in_arena, update), acknowledge)
        self._enqueue(update, others)

    def _enqueue(self, update: QueuedUpdate, workers: Collection[int]) -> None:
        self.transfers.enqueue(update, workers)
        if self.slots is not None:
            for worker in set(workers).difference(self.connections.workers):  # their deaths were noticed meanwhile
                self._move_to_word(worker)

    def _point(self, updates: Mapping[int, QueuedUpdate], acknowledge: bool) -> None:
        for worker, update in updates.items():
            assert self.slots is not None, "without an arena no worker is routed to it"
            self.slots.point(worker, update.version, update.buffer.slot, acknowledge)

    def prepare(self, update: QueuedUpdate, workers: Collection[int]) -> None:
        """Have ``workers`` check an update and keep it."""
        in_arena, others = self._split(workers)
        place = PREPARE_PAYLOAD.pack(update.transaction, update.buffer.slot)
        for worker in in_arena:
            self.connections.send(worker, Message(Kind.PREPARE, worker, update.version, place))
        self._enqueue(update, [worker for worker in others if worker in self.connections.workers])

    def commit(self, prepared: Mapping[int, QueuedUpdate]) -> None:
        """Have workers install what they have prepared.

        In the arena the published word is the commit, for all models of the transaction.
        """
        in_arena, others = self._split(prepared)
        self._point({worker: prepared[worker] for worker in in_arena}, acknowledge=True)
        for worker in others:
            self.transfers.queues[worker].commit(prepared[worker])

    def abort(self, workers: Collection[int], transaction: int) -> None:
        """Have ``workers`` drop what they have prepared."""
        in_arena, others = self._split(workers)
        for worker in in_arena:
            self.connections.send(worker, Message(Kind.ABORT, worker, transaction))
        for worker in others:
            self.transfers.queues[worker].abort(transaction)

    def newest_buffer(self) -> Buffer | None:
        """Return the buffer that all workers were sent last; None if there is none, or they differ."""
        buffers: dict[int, Buffer] = {}
        for worker, queue in enumerate(self.transfers.queues):
            if queue.latest is None and self.slots is not None:
                version, slot = self.slots.arena.writer.published(worker)
                buffer = self.slots.arena.buffer(slot) if version else None
            else:
                buffer = None if queue.latest is None else queue.latest.buffer
            if buffer is None:
                return None
            buffers[buffer.slot] = buffer
        return next(iter(buffers.values())) if len(buffers) == 1 else None

    def has_sent(self, version: int) -> bool:
        """See ``SenderSideChannel``."""
        queued = any(queue.latest is not None and queue.latest.version == version for queue in self.transfers.queues)
        published = () if self.slots is None else map(self.slots.arena.writer.published, range(self.num_workers))
        return queued or any(one == version for one, _ in published)

    def carried_bytes(self, version: int) -> int:
        """See ``SendChannel``."""
        whole = self.layout.nbytes if self.layout else 0
        sent = 0 if self.slots is not None and self.slots.workers else self.transfers.carried_bytes(version)
        return sent or whole

    def close(self, *, finished: bool) -> None:
        """See ``SendChannel``."""
        slots, self.slots = self.slots, None  # first: in a forked child, disconnecting must not write to the arena
        with ExitStack() as steps:  # from the last to the first; all are done, even if a signal handler raises in one
            if slots is not None:
                steps.callback(slots.arena.close)
            steps.callback(self.transfers.close)
            self.connections.close(finished=finished)
