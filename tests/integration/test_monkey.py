"""The chaos monkey in train.py, as people run it."""

from __future__ import annotations

import os
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
