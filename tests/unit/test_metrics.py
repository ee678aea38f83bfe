"""The cost of updates: percentiles, and the memory that they take."""

from __future__ import annotations

import tracemalloc

import pytest

from wsync import SyncMetrics, SyncReport

PHASES = ("extract", "pack", "transfer", "wait", "apply", "acknowledge")


def report_of(version: int, workers: int) -> SyncReport:
    return SyncReport(version, 64, version * 1e-6, dict.fromkeys(PHASES, version * 1e-7), dict.fromkeys(range(workers)))


def test_the_costs_of_many_updates_take_little_memory() -> None:
    metrics = SyncMetrics("shared_mem")
    tracemalloc.start()
    for version in range(1, 10_001):
        metrics.record(report_of(version, workers=130))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken / 10_000 < 200, "bytes for each"
    summary = metrics.summary()
    assert (summary["updates"], summary["version"]) == (10_000, 10_000)
    assert summary["latency_us"]["p50"] == pytest.approx(5000.0)
    assert summary["phases_us"] == pytest.approx(dict.fromkeys(PHASES, 500.05))


def test_the_costs_of_the_newest_updates_are_kept() -> None:
    metrics = SyncMetrics("shared_mem", keep=2)
    assert metrics.latencies_us == [] and metrics.last is None
    for version in range(1, 4):
        metrics.record(report_of(version, workers=1))
    assert metrics.latencies_us == pytest.approx([2.0, 3.0])
    assert metrics.last == report_of(3, workers=1)
