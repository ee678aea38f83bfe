"""A GPT-2 of ``transformers`` in the trainer: every carrier, an engine of another class, LoRA, a part of the model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from programs import run_program

pytest.importorskip("transformers", reason="the GPT-2 is one of transformers, which is not installed")
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("carrier", "precision"), [("shared_mem", "int8"), ("store", "int8"), ("http", "bfloat16"), ("ray", "bfloat16")]
)
def test_an_engine_of_another_class(carrier: str, precision: str, tmp_path: Path) -> None:
    """The example compares the logits of each version, which a generating process has made, with a reference's."""
    if carrier == "ray":
        pytest.importorskip("ray", reason="Ray is not installed")
    program = ROOT / "examples" / "unlike_ends.py"
    done = run_program(program, f"{carrier}-{precision}", folder=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"GPT2LMHeadModel → Engine by {carrier}, {precision}:\n")
    line = r"^version \d+: (\d+) bytes of 2675200; logits 0\.0 off the reference"
    sizes = [int(found) for found in re.findall(line, done.stdout, re.MULTILINE)]
    assert sizes == [700672 if precision == "int8" else 1337600] * 5, done.stdout
