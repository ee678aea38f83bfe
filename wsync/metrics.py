"""What updates cost: phase by phase, in percentiles, and beside a plain copy of the same bytes."""

from __future__ import annotations

import math
import statistics
import struct
import time
from collections import deque
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch

from wsync.update import PHASES, SyncReport

_COST = struct.Struct(f"{1 + len(PHASES)}d")  # seconds, and those of each phase
_each_phase = itemgetter(*PHASES)
_COPIES, _COPY_SECONDS, _LARGEST_COPY = 25, 0.4, 64 << 20  # of the plain copy: timed, seconds in all, bytes
_AT_ONCE = 256  # reports are packed so many at a time: no update is to wait for what can wait


class SyncMetrics:
    """The reports of one scheme's updates.

    Args:
        scheme: its name in configs (``"shared_mem"``).
        keep: for how many of the newest updates the cost is kept, for percentiles.

    Attributes:
        updates: how many there were.
        last: the newest report.
    """

    def __init__(self, scheme: str, keep: int = 100_000) -> None:
        self.scheme = scheme
        self.updates = 0
        self.last: SyncReport | None = None
        self._costs: deque[bytes] = deque(maxlen=keep)  # packed: a report names each worker, and takes kilobytes
        self._unpacked: deque[SyncReport] = deque()

    def record(self, report: SyncReport) -> None:
        """Take in one update."""
        self.updates += 1
        self._unpacked.append(report)
        self.last = report  # after it is kept: another thread may call ``summary``
        if len(self._unpacked) >= _AT_ONCE:
            self._pack()

    def _pack(self) -> None:
        while self._unpacked:
            try:
                report = self._unpacked.popleft()
            except IndexError:  # another thread, which reads them, was faster
                return
            self._costs.append(_COST.pack(report.seconds, *_each_phase(report.phases)))

    def _columns(self) -> tuple[tuple[float, ...], ...]:
        """Seconds of every update kept, oldest first; then those of each phase."""
        self._pack()
        return tuple(zip(*map(_COST.unpack, self._costs.copy()), strict=True)) or ((),) * (1 + len(PHASES))

    @property
    def latencies_us(self) -> list[float]:
        """Microseconds of every update kept, oldest first."""
        return [seconds * 1e6 for seconds in self._columns()[0]]

    def summary(self) -> dict[str, Any]:
        """Everything in one dictionary of plain values; times in microseconds, sizes in bytes."""
        result: dict[str, Any] = {"scheme": self.scheme, "updates": self.updates, "version": 0, "bytes": 0}
        if self.last is None:
            return result
        seconds, *phases = self._columns()
        latencies = [value * 1e6 for value in seconds]
        median = percentile(latencies, 0.5)
        copy = plain_copy_us(self.last.bytes) if self.last.bytes else 0.0
        result.update(
            version=self.last.version,
            bytes=self.last.bytes,
            latency_us={
                "p50": median,
                "p95": percentile(latencies, 0.95),
                "p99": percentile(latencies, 0.99),
                "max": max(latencies),
            },
            phases_us={phase: statistics.median(values) * 1e6 for phase, values in zip(PHASES, phases, strict=True)},
            gib_per_second=self.last.bytes / 2**30 / (median / 1e6) if median else 0.0,
            plain_copy_us=copy,
            over_plain_copy=median / copy if copy else 0.0,
        )
        return result


def percentile(values: Sequence[float], fraction: float) -> float:
    """The smallest of ``values`` that at least ``fraction`` of them do not exceed (the nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def plain_copy_us(nbytes: int) -> float:
    """Median microseconds of one copy of ``nbytes`` bytes by one thread, here and now; takes half a second at most.

    Of more than 64 MiB only so much is copied, and the time is scaled. One thread, because torch would divide a large
    copy among its threads, which wait for one another while workers use the cores.
    """
    copied = min(nbytes, _LARGEST_COPY)
    source = torch.ones(copied, dtype=torch.uint8).numpy()
    destination = source.copy()  # and so in memory that has been written before
    times: list[float] = []
    for _ in range(1 + _COPIES):  # the first one is not counted
        started = time.perf_counter()
        destination[:] = source
        times.append((time.perf_counter() - started) * 1e6)
        if sum(times[1:]) > _COPY_SECONDS * 1e6:
            break
    return statistics.median(times[1:]) * nbytes / copied
