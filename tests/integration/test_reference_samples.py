"""Each code sample of the reference documents, as a program of our own with the same sequence of public calls.

The programs are in ``reference_samples/``; they run as scripts, and check what they deliver.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import run_program

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted((Path(__file__).parent / "reference_samples").glob("*.py"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_a_sample_runs(program: Path, tmp_path: Path) -> None:
    done = run_program(program, folder=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout != ""
    assert done.stderr == "" or "frames_per_batch=100 is rounded up" in done.stderr


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_a_sample_imports_nothing_of_the_documents_library(program: Path) -> None:
    assert "torchrl" not in program.read_text(encoding="utf-8")
