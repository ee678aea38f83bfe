"""An update that was published and is not acknowledged by all workers yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wsync.types import Ack, SyncReport


@dataclass(slots=True, kw_only=True)
class InFlight:
    """An update's workers, its deadline, and the seconds that each phase has taken so far.

    Attributes:
        workers: those that have to acknowledge it.
        extra: the extra state of each group of workers; these may include absent ones.
        acknowledge: whether acknowledgements are waited for.
        live: whether the weights are those in registered buffers, which need not be written.
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
    live: bool = True

    @property
    def packed(self) -> float:
        """When the weights were packed, on ``time.perf_counter``."""
        return self.started + self.extract + self.wait + self.pack

    def report(self, nbytes: int, acks: Sequence[Ack], finished: float) -> SyncReport:
        """Return what the update has cost; the phases add up to the whole.

        Args:
            nbytes: of one copy of the weights.
            acks: the acknowledgements, if they were waited for.
            finished: when the last one arrived, on ``time.perf_counter``.
        """
        slowest = max(acks, key=lambda ack: ack.wait + ack.apply, default=Ack(-1, self.version))
        left = finished - self.packed
        # A worker may begin while others are still being told; that time must not be counted twice.
        apply = min(slowest.apply, left)
        wait = min(slowest.wait, left - apply)
        transfer = min(self.transfer, left - apply - wait)
        return SyncReport(
            version=self.version,
            bytes=nbytes,
            seconds=finished - self.started,
            phases={
                "extract": self.extract,
                "pack": self.pack,
                "transfer": transfer,
                "wait": self.wait + wait,
                "apply": apply,
                "acknowledge": left - apply - wait - transfer,
            },
            workers=dict.fromkeys(self.workers, self.version),
        )
