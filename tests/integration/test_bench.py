"""The benchmark of weight sync: it runs, its figures are plausible, and it detects a scheme that does not deliver."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
import typer
from programs import run_program
from rich.console import Console
from stopping import ends

import wsync

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import check_kills
import check_store
import figures
from bench import app
from bench.config import BenchConfig, BenchError, Case
from bench.results import exit_status
from harness.bare_loop import BareLoop
from harness.models import RevealingModel, cartpole_policy, fill

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no process has this file in its path
SCRIPT = Path(app.__file__).parents[1] / "bench_sync.py"
TINY = ("mib=[0.01]", "policy_mib=[0.018]", "workers=[1]", "rounds=2", "acting=2", "acknowledge=published")


class DroppingScheme(wsync.SharedMemWeightSyncScheme):
    """Drops every other update, and reports that it was delivered."""

    def send(self, weights=None, worker_ids=None):
        self.calls = vars(self).get("calls", 0) + 1
        return None if self.calls % 2 == 0 else super().send(weights, worker_ids)


def dropping(case: Case) -> wsync.WeightSyncScheme:
    return DroppingScheme(timeout=case.timeout, acknowledge=case.acknowledge)


def options(folder: Path, *overrides: str) -> list[str]:
    return [f"hydra.run.dir={folder}", *TINY, *overrides]


@pytest.mark.parametrize(
    "nothing",
    ["check_torn.py --forwards=0", "check_kills.py --kills=0", "check_kills.py --pause=0", "bench_start.py --rounds=0",
     "bench_collect.py --seconds=0", "bench_transforms.py --rounds=0"],
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


def test_the_table_of_kills_has_each_count_below_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tally = check_kills.Tally()
    tally.stale += 7
    monkeypatch.setattr(check_kills, "check", lambda *_, **__: tally)
    with pytest.raises(typer.Exit):
        check_kills.main(kills=1, workers=1, pause=1.0, seed=0)
    lines = [[cell.strip() for cell in re.split("[┃│]", one)] for one in capsys.readouterr().out.splitlines()]
    header, counts = (next(one for one in lines if name in one) for name in ("backend", "shared_mem"))
    assert counts[header.index("stale")] == "7"


def without_the_last_version(channel: Connection, worker: int, url: str, mib: float, last: int) -> None:
    channel.send("ready")
    channel.send((time.time(), check_kills.Tally(), last - 1))


def test_a_reader_of_a_store_without_the_last_version_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    check_store.main(readers=1, versions=2, kib=1)
    monkeypatch.setattr(check_store, "read_store", without_the_last_version)
    with pytest.raises(typer.Exit):
        check_store.main(readers=1, versions=2, kib=1)


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
def test_what_transforms_send_arrives_exactly(tmp_path: Path) -> None:
    small = ("--mib=0.1", "--tensors=10", "--rounds=2", "--backend=http")
    done = run_program(SCRIPT.with_name("bench_transforms.py"), *small, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "×" in line]
    sizes = {name: int(size.replace(",", "")) for name, size, *_ in rows}
    assert len(rows) == 6 and all(row[-1] == "exact" for row in rows)
    assert sizes["Cast(bfloat16)"] < 0.6 * sizes["plain"] and sizes["Select one tenth"] < 0.2 * sizes["plain"]


@pytest.mark.slow
def test_a_small_run(tmp_path):
    done = run_program(SCRIPT, *options(tmp_path, "backends=[shared_mem]"), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    assert [(case["kind"], case["backend"]) for case in found["cases"]] == [
        (kind, "shared_mem") for kind in ("send", "update")
    ]
    for case in found["cases"]:
        assert (case["status"], case["rounds"], case["wrong"]) == ("ok", 2, 0)
        assert 0 < case["min_us"] <= case["p50_us"] <= case["p95_us"] <= case["p99_us"]
        assert case["over_copy"] > 0 and case["gib_s"] > 0
        assert case["trainer_cpu_us"] > 0 and case["workers_cpu_us"] >= 0
        assert sum(case["phases_us"].values()) > 0
        assert [one["process"] for one in case["memory_mib"]] == ["trainer", "worker 0"]
        assert all(one["resident"] > 50 for one in case["memory_mib"])
        if case["kind"] == "send":
            # In the time of two sends the worker may not have run a single forward.
            assert case["acting"]["sends"] == 2 and case["acting"]["usual_longest_us"] > 0
            assert case["acting"]["mixed"] == case["acting"]["backwards"] == 0
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")
    assert "shared_mem, published" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["send", "update"])
def test_a_scheme_that_drops_updates_is_wrong(tmp_path, kind):
    cfg = BenchConfig(
        backends=["shared_mem"], mib=[0.01], workers=[2], rounds=4, acting=0, kind=kind, acknowledge="installed"
    )
    cfg.policy_mib = [0.018]
    (row,) = app.bench(cfg, tmp_path, Console(width=160, quiet=True), dropping)
    assert row["status"] == "WRONG"
    assert 4 <= row["wrong"] <= 5  # half of the rounds, the warm ones among them
    assert "worker 0 saw" in row["wrong_example"] and "worker 1 saw" in row["wrong_example"]
    assert exit_status([row]) == 1


def test_invalid_settings_are_refused(tmp_path, monkeypatch):
    for wrong in (
        BenchConfig(backends=["unknown"]),
        BenchConfig(kind="receive"),
        BenchConfig(tensors="many"),
        BenchConfig(rounds=0),
    ):
        with pytest.raises(BenchError):
            app.bench(wrong, tmp_path, Console(quiet=True))
    monkeypatch.setattr(app, "find_spec", lambda name: None)
    with pytest.raises(BenchError, match=r"pip install -e '\.\[bench\]'"):
        app.bench(BenchConfig(peer="torchrl"), tmp_path, Console(quiet=True))


@pytest.mark.parametrize(("mib", "tensors"), [(0.018, 6), (1.0, 20)])
def test_policies_have_the_size_that_was_asked_for(mib, tensors):
    policy = cartpole_policy(mib, tensors)
    assert len(list(policy.parameters())) == tensors
    assert sum(parameter.nbytes for parameter in policy.parameters()) == pytest.approx(mib * 2**20, rel=0.05)


def test_a_model_reveals_every_weight():
    model = RevealingModel(0.01, 4, 0.0)
    fill(model, 3.0)
    assert model().tolist() == model(False).tolist() == [3.0, 3.0]
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
    deadline, found = time.monotonic() + 60, descendants(process.pid)
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
