"""The benchmark of weight sync: it runs, its figures are plausible, and it detects a scheme that does not deliver."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import typer
from programs import run_program
from stopping import ends

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_sync
import compare_editions
import figures
from bench_sync import BenchConfig, BenchError
from harness.bare_loop import BareLoop
from harness.models import RevealingModel, fill, revealing_policy
from harness.sides import Case, Side

SCRIPT = Path(bench_sync.__file__)
TINY = ("mib=[0.01]", "policy_mib=[0.018]", "workers=[1]", "rounds=2")


def options(folder: Path, *overrides: str) -> list[str]:
    return [f"out={folder}", *TINY, *overrides]


@pytest.mark.parametrize(
    "nothing",
    ["check_torn.py --forwards=0", "check_kills.py --kills=0", "check_kills.py --pause=0",
     "bench_collect.py --seconds=0"],
)  # fmt: skip
def test_a_script_refuses_to_measure_nothing(
    nothing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, option = nothing.split()
    monkeypatch.setattr(sys, "argv", [name, option])
    with pytest.raises(SystemExit) as refused:
        runpy.run_path(str(SCRIPT.with_name(name)), run_name="__main__")
    printed = capsys.readouterr().err
    assert refused.value.code == 2 and f"'{option.partition('=')[0]}'" in printed, printed


def test_a_benchmark_that_failed_is_the_exit_status_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = figures.Benchmark("none", "None", "", "-c raise(SystemExit(3))")
    monkeypatch.setattr(figures, "BENCHMARKS", (failing,))
    monkeypatch.setattr(figures, "PAGE", tmp_path / "figures.md")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    with pytest.raises(typer.Exit):
        figures.main()
    assert "exit status 3" in (tmp_path / "figures.md").read_text()


class EndingEnvs(gymnasium.vector.VectorEnv):
    """Two environments: the first ends an episode in every other step, and is reset in the steps between."""

    steps = 0

    def step(self, actions: Any) -> Any:
        self.steps += 1
        ended, never = np.array([self.steps % 2 == 1, False]), np.zeros(2, dtype=bool)
        return np.zeros((2, 4), dtype=np.float32), np.zeros(2), ended, never, {}


def test_the_bare_loop_counts_no_step_that_only_resets() -> None:
    loop = BareLoop("CartPole-v1", 2)
    loop.env.close()
    loop.env = envs = EndingEnvs()
    frames, _ = loop.run(0.1)
    assert frames == 1.5 * envs.steps > 0


@pytest.mark.slow
def test_a_small_run(tmp_path):
    done = run_program(SCRIPT, *options(tmp_path, "backends=[shared_mem]"), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "results.json").read_text())["cases"]
    labels = ["shared_mem, installed", "shared_mem, published"]
    assert [(case["kind"], case["label"]) for case in found] == [
        (kind, label) for kind in ("send", "update") for label in labels
    ]
    for case in found:
        assert (case["status"], case["wrong"]) == ("ok", 0)
        assert 0 < case["min_us"] <= case["p50_us"] <= case["p95_us"]
        assert case["over_copy"] > 0
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")
    assert all(label in done.stdout for label in labels)


def test_a_send_that_drops_updates_is_wrong():
    model, worker = RevealingModel(0.01, 4, 0.0), RevealingModel(0.01, 4, 0.0)
    sends = iter(range(100))

    def drop_every_other() -> None:
        if next(sends) % 2 == 0:
            fill(worker, model().tolist()[0])

    side = Side(model, drop_every_other, lambda: [worker().tolist()])
    rounds = [*side.rounds(2, 60.0), *side.rounds(4, 60.0)]
    row = bench_sync.row_of(Case("send", "shared_mem", 0.01, 4), {"wsync": rounds})
    assert row["status"] == "WRONG" and row["wrong"] >= 4  # those of the warm rounds as well
    assert "workers saw" in row["error"]


def test_an_edition_that_is_slower_is_found():
    old, new = {"a": [1.0, 2.0, 3.0], "b": [2.0]}, {"a": [9.0, 3.0, 3.0], "b": [2.0]}
    _, ratios = compare_editions.table_of(old, new, 1.25)
    assert ratios == {"a": 1.5, "b": 1.0}


def test_invalid_settings_are_refused(monkeypatch):
    for wrong in (
        BenchConfig(backends=["unknown"]),
        BenchConfig(kind="receive"),
        BenchConfig(tensors="many"),
        BenchConfig(rounds=0),
    ):
        with pytest.raises(BenchError):
            bench_sync.check(wrong)
    monkeypatch.setattr(bench_sync, "find_spec", lambda name: None)
    with pytest.raises(BenchError, match=r"pip install -e '\.\[bench\]'"):
        bench_sync.check(BenchConfig(peer="torchrl"))


@pytest.mark.parametrize(("mib", "tensors"), [(0.018, 6), (1.0, 20)])
def test_policies_have_the_size_that_was_asked_for(mib, tensors):
    policy = revealing_policy(mib, tensors)
    assert len(list(policy.parameters())) == tensors
    assert sum(parameter.nbytes for parameter in policy.parameters()) == pytest.approx(mib * 2**20, rel=0.05)


def test_a_model_reveals_every_weight():
    model = RevealingModel(0.01, 4, 0.0)
    fill(model, 3.0)
    assert model().tolist() == [3.0, 3.0]
    model.weights[2].data[5] = 4.0
    assert model().tolist() == [3.0, 4.0]


@pytest.mark.slow
def test_an_interrupt_leaves_no_process(tmp_path):
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *options(tmp_path, "backends=[distributed]", "kind=send", "rounds=1000000")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline, found = time.monotonic() + 200, descendants(process.pid)
    while max(found.values(), default=0) < 4:  # fork server, side, its fork server, worker
        assert time.monotonic() < deadline
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
            pytest.fail(str(process.communicate()))
        found = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=250)
    assert process.returncode == 130, output + errors
    assert not [pid for pid in found if not ends(pid)]
    assert (tmp_path / "results.json").exists()


def descendants(pid: int, depth: int = 1) -> dict[int, int]:
    """All processes that descend from ``pid``, and how far."""
    found: dict[int, int] = {}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in map(int, task.read_text().split()):
                found |= {child: depth} | descendants(child, depth + 1)
    return found
