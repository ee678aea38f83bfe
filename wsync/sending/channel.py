"""The channel of a sender to its workers: buffers, updates, transactions, and the wait for answers.

Weights are packed once for all workers: into a slot of the arena, or into a private buffer if there is no arena. A
worker that has mapped the arena is pointed to the slot; every other worker is sent the same memory by its transport.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from wsync.control.early_joins import EarlyJoin
from wsync.control.messages import Kind
from wsync.deadlines import NOW
from wsync.fast_path import FastCalls, UnfinishedUpdate
from wsync.sending.forking import fork_aware
from wsync.sending.queued_update import QueuedUpdate
from wsync.sending.routes import Routes
from wsync.sending.send_loop import SendLoop
from wsync.sending.transport_fast_path import transport_fast_calls
from wsync.shm.registered import RegisteredWeights
from wsync.types import Ack
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer, BufferPool

_LOCK_TIMEOUT = 2.0  # seconds; while this process exits, a daemon thread may hold the lock until its deadline
_JOIN_TIMEOUT = 2.0  # seconds; with a closed transport a thread ends at once, unless the transport does not return


class SenderSideChannel:
    """The channel of one sender to its workers: a ``TransactionChannel`` with a fast path.

    Used by the thread that calls the scheme, and by the send-loop thread. ``_lock`` keeps their calls apart.

    Args:
        routes: the routes to the workers.
        device: where weights are packed if there is no arena.
    """

    def __init__(self, routes: Routes, device: torch.device) -> None:
        self._routes = routes
        self._connections = routes.connections
        self._lock = threading.RLock()
        self._pool = BufferPool(device)  # of buffers, if there is no arena
        self._reserved: set[int] = set()  # slots of the buffers of an update that is being packed, or prepared
        self._prepared: dict[int, dict[int, QueuedUpdate]] = {}  # by transaction, then worker
        self._loop = SendLoop(routes.connections, self._lock, routes.needs_send_loop)
        self._closed = False
        fork_aware.add(self)

    @property
    def workers(self) -> Collection[int]:
        """See ``SendChannel``."""
        return self._connections.workers

    def check_layout(self, layout: Layout, version: int) -> None:
        """See ``SendChannel``."""
        with self._lock:
            self._routes.check_layout(layout, version)

    def set_layout(self, layout: Layout) -> None:
        """See ``SendChannel``."""
        with self._lock:
            self._routes.set_layout(layout)

    def wait_for_workers(self, workers: Collection[int], sentinels: Mapping[int, int], deadline: float | None) -> None:
        """See ``SendChannel``."""
        with self._lock:
            try:
                self._connections.wait_for_workers(workers, sentinels, deadline)
            finally:  # some may have connected
                self._loop.connections_changed()
                self._loop.start_or_end()

    def pop_early_join(self, worker: int, sentinel: int | None) -> EarlyJoin | None:
        """See ``SendChannel``."""
        with self._lock:
            self._connections.process_arrived_messages()  # notices its death
            return self._connections.early_joins.pop(worker, sentinel)

    def keep_early_join(self, worker: int, join: EarlyJoin) -> None:
        """See ``SendChannel``."""
        with self._lock:
            if worker in self.workers:
                self._connections.early_joins.add(worker, join)

    def give_up(self, worker: int) -> None:
        """See ``SendChannel``."""
        self._connections.give_up(worker)

    def disconnect(self, worker: int) -> None:
        """See ``SendChannel``."""
        with self._lock:
            self._connections.disconnect(worker)

    # --- buffers ---

    def reserve(self, workers: Collection[int], deadline: float | None) -> Buffer:
        """See ``SendChannel``."""
        with self._lock:
            slots, layout = self._routes.slots, self._routes.layout
            assert layout is not None, "set_layout() comes first"
            busy = self._routes.transfers.busy_slots | self._reserved
            buffer = self._pool.buffer(layout, busy) if slots is None else slots.reserve(busy, deadline)
            self._reserved.add(buffer.slot)
            return buffer

    def release(self, buffers: Iterable[Buffer]) -> None:
        """See ``SendChannel``."""
        with self._lock:
            self._reserved.difference_update(buffer.slot for buffer in buffers)

    def newest_views(self) -> Sequence[Tensor] | None:
        """See ``SendChannel``."""
        with self._lock:
            buffer = self._routes.newest_buffer()
            return None if buffer is None else buffer.views

    def carried_bytes(self, version: int) -> int:
        """See ``SendChannel``."""
        with self._lock:
            return self._routes.carried_bytes(version)

    def share_registered(self, tensors: Mapping[str, Tensor]) -> RegisteredWeights | None:
        """Describe to the workers where registered weights lie; None if that is not in shared memory."""
        with self._lock:
            slots = self._routes.slots
            return None if slots is None else RegisteredWeights.create(slots.arena, tensors)

    def has_sent(self, version: int) -> bool:
        """Whether a worker has been sent ``version``, or it waits to be: after an update that was interrupted."""
        with self._lock:
            return self._routes.has_sent(version)

    def published_views(self) -> list[Sequence[Tensor]]:
        """Return each slot that workers are pointed to, as new tensors."""
        with self._lock:
            slots = self._routes.slots
            return [] if slots is None else slots.published_views()

    # --- updates ---

    def publish(self, buffer: Buffer, version: int, extra: bytes, workers: Collection[int], acknowledge: bool) -> None:
        """See ``SendChannel``."""
        with self._lock:
            update = QueuedUpdate(Kind.UPDATE, version, buffer, extra)
            self._routes.store_extra_and_checksum(update)
            self._routes.publish(update, workers, acknowledge)
            self.release([buffer])

    def fast_calls(self, *, acknowledge: bool) -> FastCalls | None:
        """Return the calls of the fast path; None if it cannot be used now.

        Called after an update to all workers. The result is valid until another method is called.
        """
        with self._lock:  # the send-loop thread may disconnect a worker
            slots, num_workers = self._routes.slots, self._routes.num_workers
            # Without those of an update that a signal handler has interrupted as they were reserved.
            self._reserved = {one.buffer.slot for updates in self._prepared.values() for one in updates.values()}
            if self._reserved or self._routes.layout is None:
                return None
            if slots is not None and len(slots.workers) == num_workers and not self._routes.transfers.busy_slots:
                calls = slots.fast_calls(acknowledge=acknowledge)
                beside_thread = self._loop.running or self._routes.needs_send_loop()
                return self._locked(calls) if calls is not None and beside_thread else calls
            if not acknowledge:
                return None
            return transport_fast_calls(self, num_workers, self._connections.store)

    def _locked(self, calls: FastCalls) -> FastCalls:
        """Return ``calls`` for use beside the send-loop thread, which may disconnect a worker between two updates."""

        def update(tensors: Any, version: int, timeout: float | None, began: float) -> Any:
            with self._lock:
                if len(self._connections.workers) < self._routes.num_workers:
                    return None  # the descriptors in ``calls`` are closed, or belong to others by now
                return calls.update(tensors, version, timeout, began)

        def finish_publishing(unfinished: UnfinishedUpdate, version: int) -> None:
            with self._lock:
                calls.finish_publishing(unfinished, version)

        return FastCalls(update, finish_publishing)

    # --- transactions ---

    def prepare(self, buffer: Buffer, version: int, extra: bytes, workers: Collection[int], transaction: int) -> None:
        """See ``TransactionChannel``."""
        with self._lock:
            update = QueuedUpdate(Kind.PREPARE, version, buffer, extra, transaction)
            self._routes.store_extra_and_checksum(update)
            self._prepared.setdefault(transaction, {}).update(dict.fromkeys(workers, update))
            self._routes.prepare(update, workers)

    def commit(self, transaction: int) -> None:
        """See ``TransactionChannel``."""
        with self._lock:
            if transaction in self._prepared:  # not in a second call
                self._routes.commit(self._prepared[transaction])
                self._forget(transaction)

    def _forget(self, transaction: int) -> None:
        self.release(update.buffer for update in self._prepared[transaction].values())
        del self._prepared[transaction]  # last: if a signal handler raises before, the second call releases them

    def abort(self, transaction: int) -> None:
        """See ``TransactionChannel``."""
        with self._lock:
            if transaction in self._prepared:
                self._routes.abort(self._prepared[transaction], transaction)
                self._forget(transaction)

    # --- acknowledgements ---

    def process_arrived_messages(self) -> None:
        """See ``SendChannel``."""
        with self._lock:
            try:
                self._connections.process_arrived_messages()
            except BaseException:  # a signal handler raised: a message may have been read and not processed
                self._routes.transfers.mark_overdue(self.workers)
                raise
            self._loop.start_or_end()

    def wait_acks(self, workers: Collection[int], version: int, deadline: float | None) -> list[Ack]:
        """See ``SendChannel``."""
        with self._lock:
            if deadline == NOW:  # only collects what has arrived; no answer is late
                acks = self._connections.wait_acks(workers, version, deadline)
                self._loop.start_or_end()  # again, if it has ended by an error
                return acks
            answered: set[int] = set()
            try:
                acks = self._connections.wait_acks(workers, version, deadline)
                answered.update(ack.worker for ack in acks)
                if late := set(workers) - answered:
                    self._routes.transfers.disconnect_unfinished(late)
                    acks += self._connections.wait_acks(late, version, NOW)  # the deaths of those
                return acks
            finally:  # also if a signal handler raised: a message may have been read and not processed
                self._routes.transfers.mark_overdue(set(workers) - answered)

    def end_in_forked_child(self) -> None:
        """See ``ForkAware``. In a child only ``close`` is called, which then closes nothing of the parent's."""
        self._lock = threading.RLock()
        self._routes.transfers.end_in_forked_child()

    def close(self, *, finished: bool = False) -> None:
        """See ``SendChannel``. A finalizer may call this in any thread, also while another one waits for answers."""
        with ExitStack() as steps:  # from the last to the first; all are done, even if a signal handler raises in one
            locked = self._lock.acquire(timeout=_LOCK_TIMEOUT)
            if not self._closed:
                steps.callback(self._join_threads)
            if locked:
                steps.callback(self._lock.release)
            if not self._closed:
                steps.callback(self._pool.clear)
                steps.callback(self._routes.close, finished=finished)
                steps.callback(self._loop.stop)
                self._closed = True  # last: if a signal handler raises before, another call repeats all steps

    def _join_threads(self) -> None:
        self._loop.close()
        for thread in self._routes.transfers.ending:  # one that runs at interpreter exit can crash the process
            thread.join(_JOIN_TIMEOUT)
