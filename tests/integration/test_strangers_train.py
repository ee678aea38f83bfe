"""What strangers hit in ``train.py``: points of issue 57, each by its input."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from test_train import command, environment, summary

QUICK = ("total_frames=512", "num_workers=1")


@pytest.mark.parametrize(("encoding", "output"), [("ascii", "output"), ("utf-8", "/dev/full")])
def test_57_9_output_is_no_reason_to_stop(encoding: str, output: str, tmp_path: Path) -> None:
    with open(tmp_path / output, "w") as stdout:  # an absolute path stays as it is
        options = {"env": environment(PYTHONIOENCODING=encoding), "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run(command(tmp_path / "run", *QUICK), cwd=tmp_path, stdout=stdout, timeout=250, **options)
    assert (done.returncode, summary(tmp_path / "run")["status"]) == (0, "finished"), done.stderr
    assert done.stderr.count("No space left on device") == (output == "/dev/full")
