"""Waiting for acknowledgements, and the one error that names each worker without the update, and the reason."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from wsync.deadlines import NOW
from wsync.errors import SyncTimeout, WorkerDied, WorkerError, WorkerFailed
from wsync.sending.in_flight import InFlight, without
from wsync.sending.membership import Membership
from wsync.sending.protocols import SendChannel
from wsync.types import ANY_VERSION, Ack

_log = logging.getLogger(__name__)


class Acknowledgements:
    """The acknowledgements of one sender's workers. Used by the thread that calls the scheme, under the sender's lock.

    Args:
        channel: reads them.
        members: workers that have died are removed from it.
    """

    def __init__(self, channel: SendChannel, members: Membership) -> None:
        self._channel = channel
        self._members = members

    def require(
        self,
        workers: Sequence[int],
        version: int,
        deadline: float | None,
        *,
        committed: bool = True,
        collected: Sequence[Ack] = (),
    ) -> Sequence[Ack]:
        """Wait until all of ``workers`` have acknowledged ``version``.

        Args:
            workers: their indices.
            version: the version that was published, or prepared.
            deadline: when to give up.
            committed: whether an acknowledgement means that the worker has the version; otherwise it means that the
                version fits.
            collected: those that have been read already.

        Raises:
            WorkerDied, WorkerFailed, SyncTimeout: an acknowledgement is missing, or is an error.
        """
        unread = without(workers, collected) if collected else workers
        acks = [*collected, *self._channel.wait_acks(unread, version, deadline)]
        if error := self._error_of(workers, version, acks, committed=committed):
            raise error
        return acks

    def collect(self, updates: Sequence[InFlight]) -> Sequence[WorkerError]:
        """Read the answers to ``updates`` that have arrived into ``InFlight.answers``. Does not wait.

        Returns:
            An error that names the workers that have died, or refused a version, if there are any; ``updates`` do not
            wait for them.
        """
        failed: list[Ack] = []
        for update in updates:
            acks = [ack for ack in self._channel.wait_acks(update.unanswered, 0, NOW) if not ack.late]
            errors = [ack for ack in acks if ack.died or ack.error]
            update.answers += [ack for ack in acks if ack not in errors and ack.version >= update.version]
            # A worker that has refused an older version may still install this one.
            gone = [ack.worker for ack in errors if ack.died or ack.version >= update.version]
            update.workers = [worker for worker in update.workers if worker not in gone]
            failed += [ack._replace(version=ack.version or update.version) for ack in errors]
        answered = [ack.worker for update in updates for ack in update.answers]
        oldest = min((ack.version for ack in failed), default=0)
        error = self._error_of(answered, oldest, failed, awaited=False)
        return [] if error is None else [error]

    def raise_failures(self, workers: Collection[int], version: int) -> None:
        """Raise if deaths, or errors of earlier versions, have been reported; does not wait.

        Raises:
            WorkerDied, WorkerFailed: names the workers.
        """
        acks = [ack for ack in self._channel.wait_acks(workers, 0, NOW) if ack.died or ack.error]
        if acks:
            # The message names the oldest version that failed: the workers may still install ``version``.
            failed = [ack.version for ack in acks if not ack.died]
            if error := self._error_of(workers, min([version, *failed]), acks, awaited=False):
                raise error

    def note_deaths(self) -> None:
        """Remove the workers that have died by now from the members. Does not wait, and raises nothing for them."""
        acks = self._channel.wait_acks(self._members.present, ANY_VERSION + 1, NOW)  # no answer has such a version
        self._members.remove([ack.worker for ack in acks if ack.died])

    def _error_of(
        self,
        workers: Collection[int],
        version: int,
        acks: Sequence[Ack],
        *,
        awaited: bool = True,
        committed: bool = True,
    ) -> WorkerError | None:
        """Return one error for all workers that lack ``version``; those that have died are removed from the members.

        ``acks`` are the acknowledgements, errors and deaths that have arrived. If ``awaited``, a worker that has none
        of them lacks the version too. For ``committed`` see ``require``.
        """
        died = {ack.worker: ack.error for ack in acks if ack.died}
        late = {ack.worker: ack.error for ack in acks if ack.late}
        failed = {ack.worker: ack.error for ack in acks if ack.error and not (ack.died or ack.late)}
        silent = set(workers) - {ack.worker for ack in acks if not ack.late} if awaited else set()
        if died:
            self._members.remove(died)
        if not (died or failed or silent):
            return None
        if silent:
            _log.debug("workers that did not answer to version %d in time: %s", version, sorted(silent))
        causes = {**died, **failed, **dict.fromkeys(silent, "did not answer before the deadline"), **late}
        outcome = f"is missing on {len(causes)} worker(s); those that have it: {sorted(set(workers) - causes.keys())}"
        if not committed:
            why = "died" if died and not (failed or silent) else "did not confirm that it fits"
            outcome = f"was applied nowhere, because {len(causes)} worker(s) {why}"
        message = "\n".join(
            [
                f"version {version} {outcome}",
                *(f"worker {worker}: {cause.strip()}" for worker, cause in sorted(causes.items())),
            ]
        )
        kind: type[WorkerError] = WorkerDied if died else WorkerFailed if failed else SyncTimeout
        return kind(message, causes, version if committed else None, failed)
