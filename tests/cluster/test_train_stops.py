"""`train.py` with workers in Ray: a signal stops it as it stops all others, whatever Ray does with signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_signal_stops_it_cleanly(tmp_path: Path, long_path: Path) -> None:
    """SIGTERM, for which Ray installs a handler of its own in C++ unless it is prevented."""
    options = ["weight_sync=ray", "logger=none", "total_frames=100_000_000", "stop_when_solved=false", "num_workers=1"]
    with subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *options, f"hydra.run.dir={tmp_path}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "COLUMNS": "100", "TMPDIR": str(long_path)},
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        assert any(line.startswith("frames ") for line in process.stdout), process.stderr.read()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=250)
    assert process.returncode == 143, err
    assert "Interrupted" in out and "Traceback" not in err
    told = json.loads((tmp_path / "summary.json").read_text())
    assert told["status"] == "interrupted" and (tmp_path / "checkpoint.pt").exists()
