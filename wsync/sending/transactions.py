"""One model's part in a transaction, which switches several models at once: see ``wsync/transaction.py``."""

from __future__ import annotations

from collections.abc import Sequence

from wsync.deadlines import deadline_in
from wsync.errors import WeightSyncError
from wsync.sending.in_flight import InFlight
from wsync.sending.protocols import TransactionChannel
from wsync.sending.updates import Updates
from wsync.types import SyncReport


class Transaction:
    """Prepares an update, then commits or aborts it. Used by the thread that calls the scheme, under the sender's lock.

    Args:
        updates: the updates of the sender.
        number: the same for all models of the transaction.
    """

    def __init__(self, updates: Updates, number: int) -> None:
        self._updates = updates
        self._number = number
        self._channel: TransactionChannel | None = None  # once workers may have prepared
        self._version = 0  # once workers may have prepared
        self._update: InFlight | None = None  # once all have prepared

    def prepare(self, weights: object, worker_ids: int | Sequence[int] | None) -> None:
        """Have every worker check an update and keep it.

        Waits first for what was sent without waiting, and raises its errors.

        Raises:
            WeightSyncError: the workers cannot keep an update that they do not use yet.
            WorkerDied, WorkerFailed, SyncTimeout: a worker refuses it, or does not answer; ``abort`` has to follow.
        """
        updates, channel = self._updates, self._updates.transaction_channel
        workers, absent = updates.members.recipients(worker_ids)
        if channel is None:
            raise WeightSyncError(
                "several models at once need initiator='sender', and no engines or stores: send the models one by one"
            )
        updates.finish_earlier()  # otherwise their answers could be mistaken for PREPARED
        with updates.packing(weights, workers, absent) as (update, packed):
            self._channel, self._version = channel, update.version
            for part, buffer, extra in packed:
                channel.prepare(buffer, update.version, extra, part.workers, self._number)
        updates.acks.require(workers, update.version, update.deadline, committed=False)
        self._update = update

    def commit(self) -> None:
        """Have the workers install what they have prepared."""
        channel, update = self._prepared()
        update.deadline = deadline_in(self._updates.timeout)
        self._updates.registered_updates.announce(update)
        channel.commit(self._number)
        self._updates.note_published(update)

    def finish(self) -> SyncReport:
        """Wait until the committed update is installed."""
        return self._updates.finish(self._prepared()[1])

    def _prepared(self) -> tuple[TransactionChannel, InFlight]:
        assert self._channel is not None and self._update is not None, "prepare() comes first"
        return self._channel, self._update

    def abort(self) -> None:
        """Have the workers forget what they have prepared, if anything. The update's version number is not reused.

        A death is not reported again by the next send: the error of the transaction has named the worker.
        """
        if self._channel is not None:
            self._channel.abort(self._number)
            self._updates.acks.forget(self._version)
        self._updates.acks.note_deaths()
