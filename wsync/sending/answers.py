"""What workers say to an update: that they have it; or one error that names each who has not, and why."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from wsync.deadlines import NOW
from wsync.errors import SyncTimeout, WorkerDied, WorkerError, WorkerFailed
from wsync.sending.end import SenderEnd
from wsync.sending.membership import Membership
from wsync.types import Ack


class Answers:
    """Those of one sender's workers.

    Args:
        end: hears them.
        members: those who have died are struck off it.
        timeout: seconds that a sender waits for them; None for no limit.
    """

    def __init__(self, end: SenderEnd, members: Membership, timeout: float | None) -> None:
        self._end = end
        self._members = members
        self.timeout = timeout

    def expect(
        self, workers: Collection[int], version: int, deadline: float | None, *, given: bool = True
    ) -> Sequence[Ack]:
        """The answers of ``workers`` to ``version``, waited for.

        Args:
            workers: who is to answer.
            version: that they were told of.
            deadline: until when.
            given: whether who says yes has it; otherwise that is for them all to decide.

        Raises:
            WorkerDied, WorkerFailed, SyncTimeout: one is missing, or says no.
        """
        acks = self._end.collect(workers, version, deadline)
        self._judge(workers, version, acks, given=given)
        return acks

    def hear_of_failures(self, workers: Collection[int], version: int) -> None:
        """Nobody answers; but a death, or an error of before, is an event that has happened or not.

        Raises:
            WorkerDied, WorkerFailed: it has.
        """
        acks = [ack for ack in self._end.collect(workers, 0, NOW) if ack.died or ack.error]
        if acks:
            refused = [ack.version for ack in acks if not ack.died]  # of versions before: this one it may take
            self._judge(workers, min([version, *refused]), acks, awaited=False)

    def _judge(
        self, workers: Collection[int], version: int, acks: Sequence[Ack], *, awaited: bool = True, given: bool = True
    ) -> None:
        """Raise one error for all workers that lack ``version``; those who died are not sent to again."""
        died = {ack.worker: ack.error for ack in acks if ack.died}
        failed = {ack.worker: ack.error for ack in acks if ack.error and not ack.died}
        silent = set(workers) - {ack.worker for ack in acks} if awaited else set()
        if died:
            self._members.strike(died)
        if not (died or failed or silent):
            return
        causes = {**died, **failed, **dict.fromkeys(silent, f"did not answer within {self.timeout} s")}
        told = f"is missing on {len(causes)} worker(s); those who have it: {sorted(set(workers) - causes.keys())}"
        if not given:
            told = f"was given to nobody, for {len(causes)} worker(s) could not say that it fits"
        message = "\n".join(
            [
                f"version {version} {told}",
                *(f"worker {worker}: {cause.strip()}" for worker, cause in sorted(causes.items())),
            ]
        )
        kind: type[WorkerError] = WorkerDied if died else WorkerFailed if failed else SyncTimeout
        raise kind(message, causes, version if given else None, failed)
