"""The chaos monkey's schedule, what it refuses, and what a hold reaches."""

from __future__ import annotations

import signal
import subprocess
import sys
from itertools import islice
from typing import Any

import pytest

from collectors import Collector, GymEnv
from collectors.chaos import Monkey, schedule
from collectors.workers.hold import Hold


def test_the_same_seed_is_the_same_schedule_and_another_is_another() -> None:
    first, again, other = (list(islice(schedule(["kill", "stop"], 60.0, seed), 50)) for seed in (1, 1, 2))
    assert first == again
    assert [strike.gap for strike in first] != [strike.gap for strike in other]
    assert {strike.fault for strike in first} == {"kill", "stop"}


def test_gaps_are_exponential_with_the_rate_as_their_mean() -> None:
    gaps = [strike.gap for strike in islice(schedule(["kill"], 120.0, 0), 20_000)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.5, rel=0.03)
    assert sum(gap > 0.5 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.015)  # 1/e
    lots = [strike.lot for strike in islice(schedule(["kill"], 120.0, 0), 1_000)]
    assert all(0 <= lot < 1 for lot in lots)


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
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with (
        Collector(lambda: GymEnv("CartPole-v1"), frames_per_batch=8) as collector,
        pytest.raises(ValueError, match=said),
    ):
        Monkey(collector, **options)


def test_without_faults_there_is_nothing_to_pay_and_any_collector_will_do() -> None:
    with Collector(lambda: GymEnv("CartPole-v1"), frames_per_batch=8) as collector, Monkey(collector) as monkey:
        assert monkey.counts == {}
        assert not monkey.running


def test_a_hold_reaches_its_process_and_nobody_after_its_end() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        hold = Hold(process.pid)
        assert not hold.empty
        assert hold.send(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
        assert not hold.send(signal.SIGKILL)
        assert Hold(process.pid).empty  # too late
        hold.close()
        hold.close()
        assert hold.empty
        assert not hold.send(signal.SIGKILL)
    assert Hold(None).empty
