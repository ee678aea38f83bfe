"""What strangers hit in ``train.py``: points of issue 57, each by its input."""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from programs import run_program
from test_train import ROOT, command, environment, started, summary

from learning.trained import load_policy, play

QUICK = ("total_frames=512", "num_workers=1")


@pytest.mark.parametrize(("encoding", "output"), [("ascii", "output"), ("utf-8", "/dev/full")])
def test_57_9_output_is_no_reason_to_stop(encoding: str, output: str, tmp_path: Path) -> None:
    with open(tmp_path / output, "w") as stdout:  # an absolute path stays as it is
        options = {"env": environment(PYTHONIOENCODING=encoding), "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run(command(tmp_path / "run", *QUICK), cwd=tmp_path, stdout=stdout, timeout=250, **options)
    assert (done.returncode, summary(tmp_path / "run")["status"]) == (0, "finished"), done.stderr
    assert done.stderr.count("No space left on device") == (output == "/dev/full")


def test_57_10_and_16_signals_to_the_process_group_and_a_resume_in_another_folder(tmp_path: Path) -> None:
    process = started(first := tmp_path / "first", "collector.on_worker_failure=restart", cwd=tmp_path)
    os.killpg(process.pid, signal.SIGUSR1)
    while not (first / "checkpoint.pt").exists():
        assert process.poll() is None and process.stdout is not None and process.stdout.readline()
    for _ in range(2):
        os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=250)
    assert process.returncode == 143, err
    assert "resume=first" in out
    told = summary(first)
    assert (told["status"], told["worker_failures"]) == ("interrupted", {})
    again = command(tmp_path / "again", "resume=first", "hydra.job.chdir=true", f"total_frames={told['frames'] + 1}")
    done = subprocess.run(again, timeout=250, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "again")["resumed_from"]["frames"] == told["frames"]


def test_57_14_help_fits_a_screen_and_names_every_option(tmp_path: Path) -> None:
    done = run_program(ROOT / "train.py", "--help", folder=tmp_path)
    lines = done.stdout.splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 120, done.stderr
    for group in ("weight_sync", "env", "env/mujoco", "env/atari", "policy", "logger", "experiment"):
        assert {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")} <= set(re.findall(r"\w+", done.stdout))
    everything = run_program(ROOT / "train.py", "env=taxi", "--help-all", folder=tmp_path).stdout
    assert "init_random_frames: 0" in everything and "Taxi" in everything
    assert not {"auto_register", "policy_weights", "per_worker_weights", "chaos"} & set(re.findall(r"\w+", everything))


def test_57_11_a_run_evaluates_its_policy_and_the_best_one_can_be_filmed(tmp_path: Path) -> None:
    logger = "tensorboard" if find_spec("tensorboard") else "none"
    done = run_program(
        ROOT / "train.py", f"hydra.run.dir={tmp_path}", f"logger={logger}", "num_envs=4", "total_frames=1024",
        "frames_per_batch=256", *QUICK[1:], "evaluate_every=300", "evaluate_episodes=2", folder=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tables = [(tmp_path / f"{one}.csv").read_text().splitlines() for one in ("evaluation", "metrics")]
    evaluated, rows = (list(csv.DictReader(lines)) for lines in tables)
    versions = {row["frames"]: row["version"] for row in rows}
    assert len(evaluated) == 2 and all(versions[one["frames"]] == one["version"] for one in evaluated)
    assert float(rows[0]["learning/loss_policy"]) and (logger == "none" or [*tmp_path.glob("events*")])
    policy, make_env = load_policy(tmp_path / "best")
    best = play(make_env, policy, 2, sample=False, seed=0, max_frames=2000)
    assert sum(best) / 2 == max(float(one["return"]) for one in evaluated)
    if logger == "none":
        missing = run_program(ROOT / "train.py", "logger=tensorboard", folder=tmp_path)
        assert missing.stderr == "train.py: logger: TensorBoardLogger: No module named 'tensorboard'\n"
    film = run_program(
        ROOT / "scripts" / "evaluate.py", str(tmp_path / "best"), "--episodes=2", "--video=film", folder=tmp_path,
        PYTHONPATH=str(ROOT), SDL_VIDEODRIVER="dummy",
    )  # fmt: skip
    if find_spec("moviepy") is None:
        assert film.returncode == 1 and film.stderr.startswith("evaluate.py: MoviePy is not installed")
    else:
        assert film.returncode == 0 and len(list((tmp_path / "film").iterdir())) == 2, film.stderr
