"""An update on its way, and what it has cost so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wsync.types import Ack, SyncReport


@dataclass(slots=True, kw_only=True)
class InFlight:
    """For whom it is, until when, and what it has cost so far, in seconds.

    Attributes:
        workers: who is to answer.
        blobs: the extra state of each part, and whom it is for; these may be more than those who are to answer.
    """

    version: int
    workers: Sequence[int]
    blobs: Sequence[tuple[Sequence[int], bytes]]
    acknowledge: bool
    deadline: float | None
    started: float
    extract: float
    wait: float
    pack: float
    transfer: float = 0.0

    @property
    def packed(self) -> float:
        """The clock's reading when the weights lay ready."""
        return self.started + self.extract + self.wait + self.pack

    def report(self, nbytes: int, acks: Sequence[Ack], finished: float) -> SyncReport:
        """What it has cost in all. The phases add up to it.

        Args:
            nbytes: of one copy of the weights.
            acks: the answers, if there were to be any.
            finished: the clock's reading when they were there.
        """
        slowest = max(acks, key=lambda ack: ack.wait + ack.apply, default=Ack(-1, self.version))
        left = finished - self.packed
        # What a worker does while others are still being told (or before, of an update that this one supersedes) would
        # be counted twice.
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
