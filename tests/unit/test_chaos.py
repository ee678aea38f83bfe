"""The chaos monkey's schedule and arguments, and signals by a process handle."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from collectors import Collector, GymEnv
from collectors.chaos import Monkey, schedule


def test_the_same_seed_is_the_same_schedule_and_another_is_another() -> None:
    first, again, other = (list(islice(schedule(["kill", "stop"], 60.0, seed), 50)) for seed in (1, 1, 2))
    assert first == again
    assert [fault.gap for fault in first] != [fault.gap for fault in other]
    assert {fault.kind for fault in first} == {"kill", "stop"}


def test_gaps_are_exponential_with_the_rate_as_their_mean() -> None:
    gaps = [fault.gap for fault in islice(schedule(["kill"], 120.0, 0), 20_000)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.5, rel=0.03)
    assert sum(gap > 0.5 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.015)  # 1/e
    positions = [fault.position for fault in islice(schedule(["kill"], 120.0, 0), 1_000)]
    assert all(0 <= position < 1 for position in positions)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"faults": ["kill", "explode"]}, "chaos.faults are of kill, stop, not explode"),
        ({"faults": ["kill"], "rate": 0.0}, "chaos.rate and chaos.pause have to be more than 0"),
        ({"faults": ["stop"], "pause": -1.0}, "chaos.rate and chaos.pause have to be more than 0"),
        ({"faults": ["kill"], "limit": -1}, "chaos.limit at least 0"),
        ({"faults": ["kill"]}, "Collector works in the trainer's process: say chaos=none"),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], said: str) -> None:
    with (
        Collector(lambda: GymEnv("CartPole-v1"), frames_per_batch=8) as collector,
        pytest.raises(ValueError, match=said),
    ):
        Monkey(collector, **options)


def test_without_faults_any_collector_is_accepted_and_no_thread_is_started() -> None:
    with Collector(lambda: GymEnv("CartPole-v1"), frames_per_batch=8) as collector, Monkey(collector) as monkey:
        assert monkey.counts == {}
        assert not monkey.running
