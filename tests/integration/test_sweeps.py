"""Hydra's plugins with train.py, and folders that have a run already."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import run_program, run_python
from stopping import left_of

from learning.summary import objective_of, summary_without_frames

ROOT = Path(__file__).resolve().parents[2]
SHORT = ("logger=none", "collector=single", "num_envs=4", "frames_per_batch=256", "total_frames=512")


def run(folder: Path, *overrides: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    return run_program(ROOT / "train.py", *SHORT, *overrides, folder=folder, status=status)


def test_the_objective_is_an_entry_of_the_summary() -> None:
    summary = {"frames": 5, "episode_return_mean_100": None, "env": "CartPole-v1", "weight_sync": {"bytes": 64}}
    assert objective_of(summary, "frames") == 5.0
    assert objective_of(summary, "weight_sync.bytes") == 64.0
    assert math.isnan(objective_of(summary, "episode_return_mean_100"))
    for name in ("staleness.mean", "weight_sync.phases_us.apply", "weight_sync.over_plain_copy"):
        objective_of(summary_without_frames(), name)


@pytest.mark.slow
def test_a_run_in_its_default_folder_prints_no_warning(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.stderr == ""
    assert len(list(tmp_path.glob("outputs/*/*-CartPole-v1-shared_mem-s*/summary.json"))) == 1


def test_a_used_folder_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    done = run(tmp_path, f"hydra.run.dir={tmp_path}", status=1)
    assert done.stdout == ""
    assert done.stderr.startswith(f"train.py: hydra.run.dir={tmp_path} has a run already: ")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.slow
@pytest.mark.timeout(400)  # each job imports everything anew
@pytest.mark.parametrize(
    ("plugin", "package", "settings"),
    [
        ("joblib", "-e '.[sweep]'", ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "collector=multi_sync"]),
        ("submitit", "-e '.[slurm]'", ["hydra/launcher=submitit_local"]),  # with workers: the test of Ctrl-C below
        ("ray", "hydra-ray-launcher 'cloudpickle<3'", ["hydra/launcher=ray", "collector=multi_sync"]),
    ],
    ids=["joblib", "submitit", "ray"],
)
def test_a_launcher_runs_jobs_and_the_sweep_is_reported(
    tmp_path: Path, plugin: str, package: str, settings: list[str]
) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{plugin}_launcher", reason=f"needs pip install {package}")
    sweep = ["seed=0,1", f"hydra.sweep.dir={tmp_path}/sweep", "-m"]
    done = run_python(ROOT / "train.py", *SHORT, *settings, *sweep, folder=tmp_path, timeout=380)
    assert done.returncode == 0, done.stderr
    told = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("sweep/*/summary.json"))]
    assert [(one["seed"], one["status"]) for one in told] == [(0, "finished"), (1, "finished")]
    assert "2 runs" in done.stdout and (tmp_path / "sweep" / "sweep.html").is_file()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ctrl_c_leaves_no_process_of_submitit(tmp_path: Path, short_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs pip install -e '.[slurm]'")
    endless = ["total_frames=1000000000", "stop_when_solved=false", "collector=multi_sync", "seed=0,1"]
    command = [sys.executable, str(ROOT / "train.py"), *SHORT[:-1], *endless, "hydra/launcher=submitit_local", "-m"]
    sweep = subprocess.Popen(
        [*command, f"hydra.sweep.dir={tmp_path}/sweep"], cwd=tmp_path, text=True, start_new_session=True,
        env={**os.environ, "TMPDIR": str(short_path)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        while sum(path.stat().st_size > 0 for path in tmp_path.glob("sweep/*/metrics.jsonl")) < 2:
            with pytest.raises(subprocess.TimeoutExpired):  # it goes on
                sweep.wait(0.1)
        assert [*short_path.glob("pymp-*")]
        os.killpg(sweep.pid, signal.SIGINT)  # as the terminal does
        sweep.communicate(timeout=60)  # until every process has closed its output
        assert sweep.returncode == 128 + signal.SIGINT
        assert not left_of(sweep.pid, 30.0)
    finally:
        if left_of(sweep.pid, 0.0):
            os.killpg(sweep.pid, signal.SIGKILL)


@pytest.mark.slow
def test_optuna_is_given_the_objective(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs pip install -e '.[sweep]'")
    sweeper = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1"]
    direction = ["hydra.sweeper.direction=maximize", "algorithm.lr=interval(1e-4,1e-2)"]
    run(tmp_path, *sweeper, *direction, f"hydra.sweep.dir={tmp_path}/sweep", "-m")
    told = [json.loads(path.read_text()) for path in tmp_path.glob("sweep/*/summary.json")]
    returns = [one["episode_return_mean_100"] for one in told]
    assert len(returns) == 2
    assert f"best_value: {max(returns)}" in (tmp_path / "sweep" / "optimization_results.yaml").read_text()


# --- the launchers of scripts, and what shadows modules ---


def test_the_slurm_launcher_names_its_extra(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # without installed packages
    python.chmod(0o755)
    done = subprocess.run(
        [ROOT / "scripts" / "launch_slurm.sh", "seed=0,1"], env={**os.environ, "PYTHON": str(python)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "pip install -e '.[slurm]'" in done.stderr


COLLECTS = """
import multiprocessing
from collectors import GymEnv, MultiSyncCollector
if __name__ == "__main__":
    with MultiSyncCollector([lambda: GymEnv("CartPole-v1")], frames_per_batch=16) as collector:
        next(collector)
    look = ("import os; os._exit('PYTHONSAFEPATH' in os.environ)",)  # in another child of the same server
    other = multiprocessing.get_context("forkserver").Process(target=exec, args=look)
    other.start()
    other.join()
    assert other.exitcode == 0
"""


@pytest.mark.parametrize("program", ["train.py", "collects.py"])
def test_files_of_the_current_folder_do_not_shadow_modules_in_workers(program: str, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for name in ("learning", "queue", "random", "types"):
        (here / f"{name}.py").write_text("import os; os._exit(9)")
    (tmp_path / "collects.py").write_text(COLLECTS)
    command: list[Any] = [tmp_path / program]
    if program == "train.py":
        command = [ROOT / program, "logger=none", "total_frames=512", "frames_per_batch=512"]
    done = run_python(*command, folder=here, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
