"""The launchers of ``scripts/``: what is missing is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_the_slurm_launcher_names_its_extra(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # without installed packages
    python.chmod(0o755)
    done = subprocess.run(
        [SCRIPTS / "launch_slurm.sh", "seed=0,1"], env={**os.environ, "PYTHON": str(python)},
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
    command: list[Any] = [sys.executable, tmp_path / program]
    if program == "train.py":
        command = [sys.executable, SCRIPTS.parent / program, "logger=none", "total_frames=512", "frames_per_batch=512"]
    path = {**os.environ, "PYTHONPATH": str(SCRIPTS.parent)}
    done = subprocess.run(command, cwd=here, env=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
