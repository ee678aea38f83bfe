"""The chaos monkey in train.py, as people run it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from stopping import left_of

from collectors import GymEnv, MultiAsyncCollector, MultiSyncCollector
from collectors.chaos import Monkey

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("logger=none", "num_envs=4", "frames_per_batch=256", "stop_when_solved=false")


def train(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """A run in a session of its own, of which nothing may be left."""
    with subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *QUICK, f"hydra.run.dir={folder}", *overrides],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        told, complaint = process.communicate(timeout=250)
    assert left_of(process.pid, kind="sid") == []
    return subprocess.CompletedProcess(process.args, process.returncode, told, complaint)


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "wsync" in name}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["shared_mem"])
def test_a_run_survives_kills_and_counts_them(tmp_path: Path, scheme: str) -> None:
    before = segments()
    done = train(
        tmp_path, f"weight_sync={scheme}", "chaos=kill", "chaos.rate=120", "chaos.limit=3",
        "collector.on_worker_failure=restart", "total_frames=6000",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = summary(tmp_path)
    failures = told["worker_failures"]
    assert (told["status"], told["frames"] >= 6_000) == ("finished", True)
    kills = told["chaos"]["kill"]
    assert sum(failures["failed"].values()) in (kills, kills - 1)  # the last one may have come after the last batch
    assert sum(failures["restarted"].values()) >= 1
    assert f"Faults injected by chaos: {kills} × kill." in done.stdout
    assert segments() <= before


ADVICE = "collector.on_worker_failure=restart (or drop) continues after the death of a worker"


@pytest.mark.slow
def test_a_run_that_does_not_bear_it_ends_with_an_error_that_names_the_worker(tmp_path: Path) -> None:
    done = train(tmp_path, "chaos=kill", "chaos.rate=120", "chaos.limit=1", "total_frames=1000000")
    assert done.returncode == 1
    waited_for, updated = r"worker [01] \(process \d+\) died with exit code -9", r"worker [01]: process \d+ died"
    assert re.search(f"{waited_for}|{updated}", done.stderr), done.stderr
    assert "Traceback" not in done.stderr and done.stderr.splitlines()[-1] == ADVICE
    told = summary(tmp_path)
    assert (told["status"], told["chaos"]) == ("failed", {"kill": 1})
    assert told["weight_sync"]["version"] >= 1 and "Nothing reached the workers" not in told["verdict"]
    assert sum(told["worker_failures"]["failed"].values()) == 1


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_the_limit_is_kept_and_every_worker_that_is_killed_is_replaced(
    kind: Callable[..., Any], ends: ExitStack
) -> None:
    makers = [lambda: GymEnv("CartPole-v1")] * 2
    collector = ends.enter_context(kind(makers, frames_per_batch=32, on_worker_failure="restart"))
    monkey = ends.enter_context(Monkey(collector, faults=["kill"], rate=1200, limit=3))
    failures = collector.failures
    # A replacement may be killed before it has joined: it is then a failure, and another one takes its place.
    while monkey.running or failures.failed.total() < 3 or failures.restarted.keys() != failures.failed.keys():
        next(collector)
    assert monkey.counts == {"kill": 3}
    assert collector.failures.failed.total() == 3
