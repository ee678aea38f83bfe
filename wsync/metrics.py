"""What updates cost: phase by phase, in percentiles, and beside a plain copy of the same bytes."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from wsync.types import PHASES, SyncReport


class SyncMetrics:
    """The reports of one scheme's updates.

    Args:
        scheme: its name in configs (``"shared_mem"``).
        keep: how many of the newest reports are kept for percentiles.
    """

    def __init__(self, scheme: str, keep: int = 100_000) -> None:
        self.scheme = scheme
        self.updates = 0
        self._reports: deque[SyncReport] = deque(maxlen=keep)

    def record(self, report: SyncReport) -> None:
        """Take in one update."""
        self.updates += 1
        self._reports.append(report)

    @property
    def last(self) -> SyncReport | None:
        """The newest report."""
        return self._reports[-1] if self._reports else None

    @property
    def latencies_us(self) -> list[float]:
        """Microseconds of every update kept, oldest first."""
        return [report.seconds * 1e6 for report in self._reports]

    def summary(self) -> dict[str, Any]:
        """Everything in one dictionary of plain values; times in microseconds, sizes in bytes."""
        result: dict[str, Any] = {"scheme": self.scheme, "updates": self.updates, "version": 0, "bytes": 0}
        if self.last is None:
            return result
        latencies = self.latencies_us
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
            phases_us={
                phase: statistics.median(report.phases.get(phase, 0.0) for report in self._reports) * 1e6
                for phase in PHASES
            },
            gib_per_second=self.last.bytes / 2**30 / (median / 1e6) if median else 0.0,
            plain_copy_us=copy,
            over_plain_copy=median / copy if copy else 0.0,
        )
        return result


def percentile(values: Sequence[float], fraction: float) -> float:
    """The smallest of ``values`` that at least ``fraction`` of them do not exceed (the nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def plain_copy_us(nbytes: int, rounds: int = 7) -> float:
    """Median microseconds of one ``Tensor.copy_`` of ``nbytes`` bytes, here and now."""
    source, destination = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        destination.copy_(source)
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times)
