"""The protocol under a simulated clock and network: no history breaks a promise, and each planted bug is found."""

from __future__ import annotations

import pytest

from wsync.testing.simulation import PLANTED, hunt, simulate


def check(first: int, count: int) -> None:
    events, orders, bad = simulate(first, count)
    assert not bad
    assert len(orders) == count and min(events[name] for name in ("kill", "cut", "stop", "commit", "abort")) > 0


@pytest.mark.parametrize("first", [0, 50, 100])
def test_no_history_breaks_a_promise(first: int) -> None:
    check(first, 50)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(150, 2150, 200))
def test_none_of_many_histories_breaks_a_promise(first: int) -> None:
    check(first, 200)


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str) -> None:
    assert hunt(bug, 1000) is not None
