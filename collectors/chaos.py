"""The chaos monkey: a thread that kills and stops workers while they work, to see what a run makes of it."""

from __future__ import annotations

import logging
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from collectors.base import BaseCollector
from collectors.crew import CrewCollector
from collectors.workers.hold import Hold

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Strike:
    """One fault to come.

    Attributes:
        gap: seconds since the one before.
        fault: ``kill`` or ``stop``.
        lot: from 0 to 1; says which of the workers that there are then.
    """

    gap: float
    fault: str
    lot: float


def schedule(faults: Sequence[str], rate: float, seed: int) -> Iterator[Strike]:
    """Faults without end, ``rate`` per minute on average (a Poisson process); the same ones from the same seed."""
    dice = random.Random(seed)
    while True:
        yield Strike(dice.expovariate(rate / 60), dice.choice(faults), dice.random())


class Monkey:
    """Harms the workers of a collector at random, from ``__enter__`` to ``__exit__``.

    Whoever is stopped goes on after ``pause`` seconds, or when the monkey ends.

    Args:
        collector: whose workers, each a process that the collector has started on this machine.
        faults: ``"kill"`` (SIGKILL) and ``"stop"`` (SIGSTOP); none: nothing is done, and no thread is started.
        rate: faults per minute, over all workers.
        seed: of the schedule.
        pause: seconds until a stopped worker goes on (SIGCONT).
        limit: it ends after so many faults; None: no limit.

    Attributes:
        counts: how many workers each fault has hit.

    Raises:
        ValueError: a fault that there is not, numbers out of range, or workers whose processes are out of reach.
    """

    def __init__(
        self,
        collector: BaseCollector,
        *,
        faults: Sequence[str] = (),
        rate: float = 12.0,
        seed: int = 1,
        pause: float = 2.0,
        limit: int | None = None,
    ) -> None:
        if unknown := [fault for fault in faults if fault not in SIGNALS]:
            raise ValueError(f"chaos.faults are of {', '.join(SIGNALS)}, not {', '.join(unknown)}")
        if rate <= 0 or pause <= 0 or (limit is not None and limit < 0):
            raise ValueError("chaos.rate and chaos.pause have to be more than 0, and chaos.limit at least 0, or null")
        self.counts = dict.fromkeys(faults, 0)
        self._strikes = schedule(faults, rate, seed)
        self._pause, self._limit = pause, limit
        self._killed: set[Hold] = set()
        self._stopped: dict[Hold, float] = {}  # until when, soonest first
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-monkey", daemon=True)
        self._collector = _within_reach(collector) if faults else None

    @property
    def running(self) -> bool:
        """Whether there is more to come."""
        return self._thread.is_alive()

    def __enter__(self) -> Self:
        """Begin."""
        if self.counts:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End, with every worker going on."""
        self._enough.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._limit is None or sum(self.counts.values()) < self._limit:
                strike = next(self._strikes)
                if not self._let_pass(time.monotonic() + strike.gap):
                    return
                self._hit(strike)
            while self._stopped and self._let_pass(min(self._stopped.values())):
                pass
        finally:
            self._wake_up(None)

    def _let_pass(self, until: float) -> bool:
        """Wait until then, and wake up whom it is time for; False if it was time to end before."""
        while True:
            soonest = min([until, *self._stopped.values()])
            if self._enough.wait(max(0.0, soonest - time.monotonic())):
                return False
            self._wake_up(time.monotonic())
            if soonest >= until:
                return True

    def _hit(self, strike: Strike) -> None:
        """Signal one of those who were not killed, and do not stand still if it is to be stopped."""
        assert self._collector is not None
        holds = {worker.hold: worker.worker_idx for worker in self._collector.remote_workers}
        self._killed &= holds.keys()  # the others were let go
        spared = self._killed | self._stopped.keys() if strike.fault == "stop" else self._killed
        victims = [hold for hold in holds if hold not in spared]
        if not victims:
            return  # all are down already
        victim = victims[int(strike.lot * len(victims))]
        if not victim.send(SIGNALS[strike.fault]):
            return  # it has ended by itself
        self.counts[strike.fault] += 1
        _log.info("%s: worker %d", strike.fault, holds[victim])
        if strike.fault == "kill":
            self._killed.add(victim)
            self._stopped.pop(victim, None)
        else:
            self._stopped[victim] = time.monotonic() + self._pause

    def _wake_up(self, now: float | None) -> None:
        """Continue those whose time has come; None: everybody."""
        for hold, until in list(self._stopped.items()):
            if now is None or until <= now:
                hold.send(signal.SIGCONT)  # it may have been ended meanwhile, for not answering
                del self._stopped[hold]


def _within_reach(collector: BaseCollector) -> CrewCollector:
    name = type(collector).__name__
    if not isinstance(collector, CrewCollector):
        raise ValueError(f"chaos needs workers, and {name} works in the trainer's process: say chaos=none")
    if strangers := [worker.worker_idx for worker in collector.remote_workers if worker.hold.empty]:
        raise ValueError(
            f"chaos reaches only processes that the collector has started on this machine, and {name} has not started "
            f"worker(s) {strangers} so: say chaos=none, or take weight_sync=shared_mem, multiprocess or distributed"
        )
    return collector
