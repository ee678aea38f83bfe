"""Code samples of the reference documents, as programs of our own with the same sequence of public calls.

The programs are in ``reference_samples/``; they run as scripts, and check what they deliver. Other samples are tests:
the calls of ``update_policy_weights_``, collectors with each scheme (``test_collectors.py``), and the older API
(``tests/contract/test_older_api.py``).
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
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert done.stdout != ""
