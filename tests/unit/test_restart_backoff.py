"""How often a worker may fail."""

from __future__ import annotations

import pytest

from collectors.workers.records import FailurePolicy, RestartBackoff


def test_one_that_fails_slowly_and_never_delivers_is_given_up() -> None:
    """Each failure is outside the window of the next one."""
    backoff = RestartBackoff(FailurePolicy("restart", max_restarts=3, restart_window=1e-9))
    assert all(backoff.failed() is not None for _ in range(3))
    assert backoff.failed() is None


def test_a_batch_between_makes_amends_outside_the_window_only() -> None:
    for window, ends in ((1e-9, False), (60.0, True)):
        backoff = RestartBackoff(FailurePolicy("restart", max_restarts=1, restart_window=window))
        assert backoff.failed() == pytest.approx(0.1)
        backoff.delivered()
        assert (backoff.failed() is None) is ends
