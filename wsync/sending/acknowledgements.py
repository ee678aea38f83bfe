"""Waiting for acknowledgements, and the one error that names each worker without the update, and the reason."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from wsync.deadlines import NOW
from wsync.errors import SyncTimeout, WorkerDied, WorkerError, WorkerFailed, join_indices
from wsync.sending.in_flight import without
from wsync.sending.membership import Membership
from wsync.sending.protocols import SendChannel
from wsync.types import ANY_VERSION, Ack

_log = logging.getLogger(__name__)

_STAYS = "A silent worker stays connected. To replace it: disconnect(index), kill its process, readmit(index, process)"


class Acknowledgements:
    """The acknowledgements of one sender's workers. Used by the thread that calls the scheme, under the sender's lock.

    Args:
        channel: reads them.
        members: workers that have died are removed from it.
    """

    def __init__(self, channel: SendChannel, members: Membership) -> None:
        self._channel = channel
        self._members = members
        self._aborted: set[int] = set()

    def forget(self, aborted: int) -> None:
        """Ignore refusals of an aborted version from now on: its transaction has raised an error already."""
        self._aborted.add(aborted)

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

    def arrived(self, workers: Collection[int]) -> Sequence[Ack]:
        """Return the answers of ``workers`` to any version, and the deaths, that have arrived. Does not wait."""
        return [ack for ack in self._channel.wait_acks(workers, 0, NOW) if ack.died or ack.version not in self._aborted]

    def raise_collected(self, failed: Sequence[Ack], *, sent: bool) -> None:
        """Raise one error for ``failed``, deaths and refusals; if there are none, do nothing.

        Args:
            failed: what ``arrived`` has returned, with the versions that were sent.
            sent: whether the update during which this is called was sent; otherwise the error has no version.

        Raises:
            WorkerDied, WorkerFailed: names the workers.
        """
        oldest = min((ack.version for ack in failed), default=0)
        if error := self._error_of((), oldest, failed, awaited=False):
            error.version = error.version if sent else None
            raise error

    def raise_failures(self, workers: Collection[int], version: int) -> None:
        """Raise if deaths, or errors of earlier versions, have been reported; does not wait.

        Raises:
            WorkerDied, WorkerFailed: names the workers.
        """
        acks = [ack for ack in self.arrived(workers) if ack.died or ack.error]
        # The message names the oldest version that failed: the workers may still install ``version``.
        oldest = min([version, *(ack.version for ack in acks if not ack.died)])
        if error := self._error_of((), oldest, acks, awaited=False):
            raise error

    def note_deaths(self) -> None:
        """Remove the workers that have died by now from the members. Does not wait, and raises nothing for them."""
        acks = self._channel.wait_acks(self._members.present, ANY_VERSION + 1, NOW)  # no answer has such a version
        self._members.remove({ack.worker: ack.error for ack in acks if ack.died})

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
        outcome = "is missing on" if committed else "was applied nowhere, because of"
        message = f"version {version} {outcome} {_summary(causes)}"
        if awaited and committed:
            message += f"\nworkers that have it: {join_indices(set(workers) - causes.keys()) or 'none'}"
        for worker, cause in sorted(causes.items()):
            if "\n" in cause.strip():
                message += f"\nworker {worker}: {cause.strip()}"
        message += f"\n{_STAYS}" if silent else ""
        kind: type[WorkerError] = WorkerDied if died else WorkerFailed if failed else SyncTimeout
        return kind(message, causes, version if committed else None, failed)


def _summary(causes: Mapping[int, str]) -> str:
    """Return the last line of each worker's error, once for the workers that share it."""
    workers: dict[str, list[int]] = {}
    for worker, cause in sorted(causes.items()):
        workers.setdefault(cause.strip().rpartition("\n")[2].strip(), []).append(worker)
    return "\n".join(f"worker{'s' * (len(some) > 1)} {join_indices(some)}: {line}" for line, some in workers.items())
