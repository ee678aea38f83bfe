"""The cost of updates: percentiles, and the memory that they take."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from wsync import SyncMetrics, SyncReport
from wsync.metrics import percentile, plain_copy_us
from wsync.types import PHASES


@pytest.mark.parametrize(
    ("count", "fraction", "rank"), [(1, 0.99, 1), (20, 0.95, 19), (100, 0.99, 99), (1000, 0.99, 990), (7, 0.5, 4)]
)
def test_a_percentile_is_the_nearest_rank(count: int, fraction: float, rank: int) -> None:
    values = [float(value) for value in range(1, count + 1)]
    random.Random(0).shuffle(values)
    assert percentile(values, fraction) == rank


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


def test_a_plain_copy_is_timed_several_times_and_the_median_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy that was interrupted for long does not count, nor does the first one."""
    spent = [0.9, *[1e-6] * 13, *[1e-3] * 12]
    clock = iter([at for seconds in spent for at in (1.0, 1.0 + seconds)])
    monkeypatch.setattr("wsync.metrics.time.perf_counter", lambda: next(clock))
    assert plain_copy_us(64) == pytest.approx(1.0)


def test_a_plain_copy_of_many_bytes_takes_no_more_memory_than_one_of_few() -> None:
    """The statistics of a large model must not take its memory twice: more than any machine has, here."""
    assert plain_copy_us(1 << 45) > plain_copy_us(1 << 20) > 0
