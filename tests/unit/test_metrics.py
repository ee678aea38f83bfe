"""What updates cost, in figures."""

from __future__ import annotations

import random

import pytest

from wsync.metrics import percentile


@pytest.mark.parametrize(
    ("count", "fraction", "rank"), [(1, 0.99, 1), (20, 0.95, 19), (100, 0.99, 99), (1000, 0.99, 990), (7, 0.5, 4)]
)
def test_a_percentile_is_the_nearest_rank(count: int, fraction: float, rank: int) -> None:
    values = [float(value) for value in range(1, count + 1)]
    random.Random(0).shuffle(values)
    assert percentile(values, fraction) == rank
