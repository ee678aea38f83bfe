"""Updates that workers have prepared in a transaction, and do not use yet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from wsync.control.messages import Kind, Message
from wsync.control.workers import WorkerConnections
from wsync.sending.queues import QueuedUpdate
from wsync.sending.slots import Slots
from wsync.sending.transfers import Transfers
from wsync.shm.arena import PREPARE
from wsync.weights.packing import Buffer

Split = Callable[[Iterable[int]], tuple[list[int], list[int]]]
"""``(workers) -> (those that use the arena, the others)``."""


class PreparedUpdates:
    """Has workers prepare, commit and abort updates. Used under the channel's lock.

    Args:
        connections: to all workers.
        transfers: to the workers that do not use the arena.
        split: tells which they are.
    """

    def __init__(self, connections: WorkerConnections, transfers: Transfers, split: Split) -> None:
        self._connections = connections
        self._transfers = transfers
        self._split = split
        self._updates: dict[int, dict[int, QueuedUpdate]] = {}  # by transaction, then worker

    @property
    def slots(self) -> set[int]:
        """The slots of buffers that must not be written."""
        return {update.buffer.slot for updates in self._updates.values() for update in updates.values()}

    def prepare(self, update: QueuedUpdate, workers: Collection[int]) -> None:
        """Have ``workers`` check an update and keep it. A transaction may have several, for different workers."""
        self._updates.setdefault(update.transaction, {}).update(dict.fromkeys(workers, update))
        in_arena, others = self._split(workers)
        place = PREPARE.pack(update.transaction, update.buffer.slot)
        for worker in in_arena:
            self._connections.send(worker, Message(Kind.PREPARE, worker, update.version, place))
        self._transfers.enqueue(update, [worker for worker in others if worker in self._connections.workers])

    def commit(self, transaction: int, slots: Slots | None) -> dict[int, Buffer]:
        """Have the workers install what they have prepared; return each worker's buffer.

        In the arena the published word is the commit, for all models of the transaction.
        """
        prepared = self._updates.pop(transaction)
        in_arena, others = self._split(prepared)
        for worker in in_arena:
            assert slots is not None, "some workers use it"
            slots.point(worker, prepared[worker].version, prepared[worker].buffer.slot, acknowledge=True)
        for worker in others:
            self._transfers.commit(worker, prepared[worker])
        return {worker: update.buffer for worker, update in prepared.items()}

    def abort(self, transaction: int) -> Iterable[Buffer]:
        """Have the workers drop what they have prepared, if anything; return the buffers."""
        prepared = self._updates.pop(transaction, {})
        in_arena, others = self._split(prepared)
        for worker in in_arena:  # may be dropped: without a commit nothing is installed
            self._connections.notify(worker, Message(Kind.ABORT, worker, transaction))
        for worker in others:
            self._transfers.abort(worker, transaction)
        return [update.buffer for update in prepared.values()]
