"""The chaos monkey: a thread that kills and stops workers at random, to test how a run handles it."""

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
from collectors.worker_collector import WorkerCollector
from collectors.workers.process_handle import ProcessHandle

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fault:
    """One fault of the schedule.

    Attributes:
        gap: seconds since the fault before.
        kind: ``kill`` or ``stop``.
        position: a number in [0, 1); selects one of the workers at that time.
    """

    gap: float
    kind: str
    position: float


def schedule(faults: Sequence[str], rate: float, seed: int) -> Iterator[Fault]:
    """Yield faults without end: a Poisson process of ``rate`` per minute, determined by ``seed``."""
    rng = random.Random(seed)
    while True:
        yield Fault(rng.expovariate(rate / 60), rng.choice(faults), rng.random())


class Monkey:
    """Kills and stops workers of a collector at random, while it is used as a context manager.

    A stopped worker continues after ``pause`` seconds, or when the context ends.

    Args:
        collector: its workers must be processes that it has started on this machine.
        faults: ``"kill"`` (SIGKILL) and ``"stop"`` (SIGSTOP); none: nothing is done, and no thread is started.
        rate: faults per minute, over all workers.
        seed: the seed of the schedule.
        pause: seconds until a stopped worker continues (SIGCONT).
        limit: number of faults; None: no limit.

    Attributes:
        counts: how often each kind of fault was applied.

    Raises:
        ValueError: an unknown fault, numbers out of range, or workers without a process on this machine.
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
        self._faults = schedule(faults, rate, seed)
        self._pause, self._limit = pause, limit
        self._killed: set[ProcessHandle] = set()
        self._stopped: dict[ProcessHandle, float] = {}  # by the time at which they continue
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-monkey", daemon=True)
        self._collector = _with_processes(collector) if faults else None

    @property
    def running(self) -> bool:
        """Whether more faults are to come."""
        return self._thread.is_alive()

    def __enter__(self) -> Self:
        """Start."""
        if self.counts:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End; continue stopped workers."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._limit is None or sum(self.counts.values()) < self._limit:
                fault = next(self._faults)
                if not self._wait_until(time.monotonic() + fault.gap):
                    return
                self._apply(fault)
            while self._stopped and self._wait_until(min(self._stopped.values())):
                pass
        finally:
            self._continue(None)

    def _wait_until(self, until: float) -> bool:
        """Wait, and continue stopped workers meanwhile; return False if the context ended before."""
        while True:
            soonest = min([until, *self._stopped.values()])
            if self._ended.wait(max(0.0, soonest - time.monotonic())):
                return False
            self._continue(time.monotonic())
            if soonest >= until:
                return True

    def _apply(self, fault: Fault) -> None:
        """Signal a worker that was not killed, nor stopped already if it is to be stopped."""
        assert self._collector is not None
        workers = {worker.process_handle: worker.worker_idx for worker in self._collector.remote_workers}
        self._killed &= workers.keys()  # the others were replaced
        spared = self._killed | self._stopped.keys() if fault.kind == "stop" else self._killed
        victims = [handle for handle in workers if handle not in spared]
        if not victims:
            return
        victim = victims[int(fault.position * len(victims))]
        if not victim.send(SIGNALS[fault.kind]):
            return  # the process has ended by itself
        self.counts[fault.kind] += 1
        _log.info("%s: worker %d", fault.kind, workers[victim])
        if fault.kind == "kill":
            self._killed.add(victim)
            self._stopped.pop(victim, None)
        else:
            self._stopped[victim] = time.monotonic() + self._pause

    def _continue(self, now: float | None) -> None:
        """Continue the workers with a pause that is over; None: all stopped workers."""
        for handle, until in list(self._stopped.items()):
            if now is None or until <= now:
                handle.send(signal.SIGCONT)  # the worker may have been killed meanwhile, for not answering
                del self._stopped[handle]


def _with_processes(collector: BaseCollector) -> WorkerCollector:
    name = type(collector).__name__
    if not isinstance(collector, WorkerCollector):
        raise ValueError(f"chaos needs workers, and {name} works in the trainer's process: say chaos=none")
    if external := [worker.worker_idx for worker in collector.remote_workers if worker.process_handle.empty]:
        raise ValueError(
            f"chaos reaches only processes that the collector has started on this machine, and {name} has not started "
            f"worker(s) {external} so: say chaos=none, or take weight_sync=shared_mem, multiprocess or distributed"
        )
    return collector
