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

    def report(self, nbytes: int, acks: Sequence[Ack], awaited: float, finished: float) -> SyncReport:
        """What it has cost in all.

        Args:
            nbytes: of one copy of the weights.
            acks: the answers, if there were to be any.
            awaited: the clock's reading when they began to be waited for.
            finished: its reading when they were there.
        """
        wait = apply = 0.0
        if acks:
            slowest = max(acks, key=lambda ack: ack.wait + ack.apply)
            wait, apply = slowest.wait, slowest.apply
        return SyncReport(
            version=self.version,
            bytes=nbytes,
            seconds=finished - self.started,
            phases={
                "extract": self.extract,
                "pack": self.pack,
                "transfer": self.transfer,
                "wait": self.wait + wait,
                "apply": apply,
                "acknowledge": max(0.0, finished - awaited - wait - apply),
            },
            workers=dict.fromkeys(self.workers, self.version),
        )
