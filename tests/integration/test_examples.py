"""The files in examples/ run as scripts, and their tests outside the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(*arguments: str | Path, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_as_a_script(example: Path, tmp_path: Path) -> None:
    assert run(example, folder=tmp_path)


def test_the_contract_suite_runs_outside_the_repository(tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "custom_backend.py", tmp_path / "my_backend.py")
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--strict-markers", "my_backend.py", folder=tmp_path)


@pytest.mark.parametrize("way", ["shared_mem", "store", "http", "int8"])
def test_unlike_ends_with_gpt2(way: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the GPT-2 is one of transformers, which is not installed")
    out = run(ROOT / "examples" / "unlike_ends.py", way, folder=tmp_path)
    assert out.count(": 700672 bytes" if way == "int8" else ": 1337600 bytes") == 5
