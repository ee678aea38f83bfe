"""An update that was published, and that not all workers have acknowledged yet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from wsync.types import PHASES, Ack, SyncReport


def without(workers: Collection[int], acks: Collection[Ack]) -> list[int]:
    """Return those of ``workers`` that ``acks`` has no answer of."""
    answered = {ack.worker for ack in acks}
    return [worker for worker in workers if worker not in answered]


@dataclass(slots=True, kw_only=True)
class InFlight:
    """An update's workers, its deadline, and the seconds that each phase has taken so far.

    Used by the thread that calls the scheme.

    Attributes:
        workers: the workers that have to acknowledge it.
        extra: the extra state of each group of workers, absent ones included.
        acknowledge: whether the sender waits for acknowledgements.
        must_copy: whether the weights are to be copied into registered weights once all workers have acknowledged them.
        write_registered: see ``Source.registered_writer``; None once it was called.
        answers: those that ``Unawaited.collect`` has read.
    """

    version: int
    workers: Sequence[int]
    deadline: float | None
    started: float
    extract: float
    wait: float
    pack: float
    transfer: float = 0.0
    extra: Sequence[tuple[Sequence[int], bytes]] = ()
    acknowledge: bool = True
    must_copy: bool = False
    write_registered: Callable[[], None] | None = None
    answers: list[Ack] = field(default_factory=list)

    @property
    def unanswered(self) -> list[int]:
        """The workers of which ``Unawaited.collect`` has read no answer."""
        return without(self.workers, self.answers)

    @property
    def packed_at(self) -> float:
        """When the weights were packed, on ``time.perf_counter``."""
        return self.started + self.extract + self.wait + self.pack

    def report(self, nbytes: int, acks: Sequence[Ack], finished: float | None) -> SyncReport:
        """Return what the update has cost; the phases add up to the whole.

        Args:
            nbytes: the bytes of one copy of the weights.
            acks: the acknowledgements, if the sender has waited for them.
            finished: when the last one arrived, on ``time.perf_counter``; None if that is not known: the report then
                has only the phases that were measured.
        """
        slowest = max(acks, key=lambda ack: ack.wait + ack.apply, default=Ack(-1, self.version))
        if finished is None:
            finished = self.packed_at + self.transfer + slowest.wait + slowest.apply
        left = finished - self.packed_at
        apply = min(slowest.apply, left)
        # The slowest worker may begin to wait while the update is still being published to others: that time is not
        # counted twice.
        wait = min(slowest.wait, left - apply)
        transfer = min(self.transfer, left - apply - wait)
        acknowledge = left - apply - wait - transfer
        seconds = (self.extract, self.pack, transfer, self.wait + wait, apply, acknowledge)
        phases: dict[str, float] = dict(zip(PHASES, seconds, strict=True))
        workers = dict.fromkeys(self.workers, self.version)
        return SyncReport(self.version, nbytes, finished - self.started, phases, workers)
