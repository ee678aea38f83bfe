"""From acknowledgements to one error that names each worker that lacks an update, and why."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from wsync.deadlines import NOW
from wsync.errors import SyncTimeout, WorkerDied, WorkerError, WorkerFailed
from wsync.sending.membership import Membership
from wsync.sending.protocols import SendChannel
from wsync.types import Ack

_log = logging.getLogger(__name__)


class Acknowledgements:
    """The acknowledgements of one sender's workers.

    Args:
        channel: reads them.
        members: workers that have died are removed from it.
        timeout: seconds that a sender waits for them; None for no limit.
    """

    def __init__(self, channel: SendChannel, members: Membership, timeout: float | None) -> None:
        self._channel = channel
        self._members = members
        self.timeout = timeout

    def require(
        self, workers: Collection[int], version: int, deadline: float | None, *, committed: bool = True
    ) -> Sequence[Ack]:
        """Wait until all of ``workers`` have acknowledged ``version``.

        Args:
            workers: their indices.
            version: which was published, or prepared.
            deadline: when to give up.
            committed: whether a worker that acknowledges has the version; otherwise it has voted for it.

        Raises:
            WorkerDied, WorkerFailed, SyncTimeout: an acknowledgement is missing, or is an error.
        """
        acks = self._channel.wait_acks(workers, version, deadline)
        self._judge(workers, version, acks, committed=committed)
        return acks

    def raise_failures(self, workers: Collection[int], version: int) -> None:
        """Raise deaths, and errors of earlier versions, that have been reported; does not wait.

        Raises:
            WorkerDied, WorkerFailed: there are some.
        """
        acks = [ack for ack in self._channel.wait_acks(workers, 0, NOW) if ack.died or ack.error]
        if acks:
            refused = [ack.version for ack in acks if not ack.died]  # earlier ones: this one may yet be installed
            self._judge(workers, min([version, *refused]), acks, awaited=False)

    def _judge(
        self,
        workers: Collection[int],
        version: int,
        acks: Sequence[Ack],
        *,
        awaited: bool = True,
        committed: bool = True,
    ) -> None:
        """Raise one error for all workers that lack ``version``; those that have died are removed."""
        died = {ack.worker: ack.error for ack in acks if ack.died}
        late = {ack.worker: ack.error for ack in acks if ack.late}
        failed = {ack.worker: ack.error for ack in acks if ack.error and not (ack.died or ack.late)}
        silent = set(workers) - {ack.worker for ack in acks if not ack.late} if awaited else set()
        if died:
            self._members.remove(died)
        if not (died or failed or silent):
            return
        if silent:
            _log.debug("workers that did not answer to version %d in time: %s", version, sorted(silent))
        causes = {**died, **failed, **dict.fromkeys(silent, f"did not answer within {self.timeout} s"), **late}
        outcome = f"is missing on {len(causes)} worker(s); those that have it: {sorted(set(workers) - causes.keys())}"
        if not committed:
            outcome = f"was applied nowhere, because {len(causes)} worker(s) did not confirm that it fits"
        message = "\n".join(
            [
                f"version {version} {outcome}",
                *(f"worker {worker}: {cause.strip()}" for worker, cause in sorted(causes.items())),
            ]
        )
        kind: type[WorkerError] = WorkerDied if died else WorkerFailed if failed else SyncTimeout
        raise kind(message, causes, version if committed else None, failed)
