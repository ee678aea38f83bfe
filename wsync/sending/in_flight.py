"""An update that was published, and that not all workers have acknowledged yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wsync.types import Ack, SyncReport, split_phases


@dataclass(slots=True, kw_only=True)
class InFlight:
    """An update's workers, its deadline, and the seconds that each phase has taken so far. Used by the sending thread.

    Attributes:
        workers: the workers that have to acknowledge it.
        extra: the extra state of each group of workers, absent ones included.
        acknowledge: whether the sender waits for acknowledgements.
        must_copy: whether the weights are to be copied into registered buffers once all workers have acknowledged them.
    """

    version: int
    workers: Sequence[int]
    extra: Sequence[tuple[Sequence[int], bytes]]
    acknowledge: bool
    deadline: float | None
    started: float
    extract: float
    wait: float
    pack: float
    transfer: float = 0.0
    must_copy: bool = False

    @property
    def packed(self) -> float:
        """When the weights were packed, on ``time.perf_counter``."""
        return self.started + self.extract + self.wait + self.pack

    def report(self, nbytes: int, acks: Sequence[Ack], finished: float) -> SyncReport:
        """Return what the update has cost; the phases add up to the whole.

        Args:
            nbytes: of one copy of the weights.
            acks: the acknowledgements, if the sender has waited for them.
            finished: when the last one arrived, on ``time.perf_counter``.
        """
        slowest = max(acks, key=lambda ack: ack.wait + ack.apply, default=Ack(-1, self.version))
        phases = split_phases(
            extract=self.extract,
            wait=self.wait,
            pack=self.pack,
            transfer=self.transfer,
            left=finished - self.packed,
            worker_wait=slowest.wait,
            worker_apply=slowest.apply,
        )
        workers = dict.fromkeys(self.workers, self.version)
        return SyncReport(self.version, nbytes, finished - self.started, phases, workers)
