"""The launchers of ``scripts/``: what is missing is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
