"""The benchmark of weight sync: it runs, its figures are plausible, and it detects a scheme that does not deliver."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import cloudpickle
import pytest
from programs import run_program
from rich.console import Console

import wsync

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from bench import app
from bench.config import BenchConfig, BenchError, Case
from bench.results import exit_status

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
