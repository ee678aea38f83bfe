"""The chaos monkey: a thread that kills and stops workers at random, to test how a run handles it."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple, Self

from collectors.base import BaseCollector
from collectors.worker_collector import WorkerCollector

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_log = logging.getLogger(__name__)


class Fault(NamedTuple):
    """One fault of the schedule."""

    gap: float  # seconds since the fault before
    kind: str
    position: float  # in [0, 1): selects one of the workers at that time


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
        self._struck: dict[BaseProcess, str] = {}  # processes that were killed, or are stopped
        self._timers: list[threading.Timer] = []  # of those that are stopped
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
                if self._ended.wait(fault.gap):
                    return
                self._apply(fault)
            self._ended.wait(self._pause)
        finally:
            for timer in self._timers:
                timer.cancel()
            for process in [process for process, kind in self._struck.items() if kind == "stop"]:
                self._continue(process)

    def _apply(self, fault: Fault) -> None:
        """Signal a worker that was not killed; one that is stopped is only killed."""
        assert self._collector is not None
        workers = {one.process: one.worker_idx for one in self._collector.remote_workers if one.process is not None}
        victims = [process for process in workers if self._struck.get(process) not in ("kill", fault.kind)]
        if not victims:
            return
        victim = victims[int(fault.position * len(victims))]
        if not _send(victim, SIGNALS[fault.kind]):
            return  # it has ended, and is not replaced yet
        self.counts[fault.kind] += 1
        self._struck[victim] = fault.kind
        _log.info("%s: worker %d", fault.kind, workers[victim])
        if fault.kind == "stop":
            self._timers.append(timer := threading.Timer(self._pause, self._continue, [victim]))
            timer.daemon = True
            timer.start()

    def _continue(self, process: BaseProcess) -> None:
        if self._struck.get(process) == "stop":
            del self._struck[process]
            _send(process, signal.SIGCONT)


def _send(process: BaseProcess, number: signal.Signals) -> bool:
    """Send a signal to a worker's process; return whether it was still running."""
    try:
        descriptor = os.pidfd_open(process.pid or 0)
        try:
            if wait([process.sentinel], 0):  # looked at now: the number may have become another process's
                return False
            signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)
    except (ProcessLookupError, ValueError):  # it has ended; the collector has closed it
        return False
    return True


def _with_processes(collector: BaseCollector) -> WorkerCollector:
    name = type(collector).__name__
    if not isinstance(collector, WorkerCollector):
        raise ValueError(f"chaos needs workers, and {name} works in the trainer's process: say chaos=none")
    if external := [worker.worker_idx for worker in collector.remote_workers if worker.process is None]:
        raise ValueError(
            f"chaos reaches only processes that the collector has started on this machine, and {name} has not started "
            f"worker(s) {external} so: say chaos=none, or take weight_sync=shared_mem, multiprocess or distributed"
        )
    return collector
