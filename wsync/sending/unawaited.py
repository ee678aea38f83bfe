"""The updates that were sent without waiting for acknowledgements, and what became of them."""

from __future__ import annotations

from collections.abc import Collection

from wsync.sending.acknowledgements import Acknowledgements
from wsync.sending.in_flight import InFlight
from wsync.sending.membership import Membership
from wsync.types import Ack


class Unawaited:
    """The updates of one sender that were sent without waiting. Used under the sender's lock.

    Args:
        acks: reads the answers.
        members: the workers.

    Attributes:
        updates: those that may still be installed, oldest first. No worker is in two of them.
    """

    def __init__(self, acks: Acknowledgements, members: Membership) -> None:
        self.updates: list[InFlight] = []
        self._acks = acks
        self._members = members
        self._failed: list[Ack] = []  # deaths and refusals that were not raised yet

    def drop_workers(self, workers: Collection[int]) -> None:
        """Drop ``workers`` from all updates: a newer update replaces these, or the worker has gone."""
        for update in self.updates:
            update.workers = [worker for worker in update.workers if worker not in workers]
        self.updates = [update for update in self.updates if update.workers]

    def collect(self) -> list[InFlight]:
        """Read the answers that have arrived, without waiting; return, once, the updates that are installed by now."""
        for update in self.updates:
            acks = [ack for ack in self._acks.arrived(update.unanswered) if not ack.late]
            failed = [ack for ack in acks if ack.died or ack.error]
            update.answers += [ack for ack in acks if ack not in failed and ack.version >= update.version]
            # A worker that has refused an older version may still install this one.
            gone = [ack.worker for ack in failed if ack.died or ack.version >= update.version]
            update.workers = [worker for worker in update.workers if worker not in gone]
            self._failed += [ack._replace(version=ack.version or update.version) for ack in failed]
            self._members.remove({ack.worker: ack.error for ack in failed if ack.died})
        installed = [update for update in self.updates if update.workers and not update.unanswered]
        self.updates = [update for update in self.updates if update.unanswered]
        return installed

    def raise_failed(self, *, sent: bool = True) -> None:
        """Raise one error for the deaths and refusals that ``collect`` has read since the last call, if there are any.

        A death is not raised once a replacement of the worker has joined. See ``raise_collected``.
        """
        failed, self._failed = self._failed, []
        present = self._members.present
        self._acks.raise_collected([ack for ack in failed if not (ack.died and ack.worker in present)], sent=sent)
