"""``scripts/launch_ray.sh``: a head, a run that joins it, and a run without the cluster's token."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stopping import left_of

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "scripts" / "launch_ray.sh"
SMALL = ["num_workers=1", "total_frames=64", "frames_per_batch=32", "num_envs=2", "logger=none"]


@pytest.fixture
def environment(tmp_path: Path, short_path: Path) -> Iterator[dict[str, str]]:
    """A running head, and the variables with which a run joins it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    names = {"HOME": str(tmp_path), "PATH": path, "PORT": port, "PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"}
    command = [LAUNCH, "head", "--block", "--num-cpus=1", "--include-dashboard=false", f"--temp-dir={short_path}"]
    head = subprocess.Popen(
        command, env={**os.environ, **names}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert head.stdout is not None
        assert any("Ray runtime started" in line for line in head.stdout), "the head did not start"
        yield {**names, "HEAD": f"127.0.0.1:{port}"}
    finally:
        head.terminate()
        head.communicate(timeout=100)
    assert left_of(head.pid) == []


def run(folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LAUNCH, "run", *SMALL, f"hydra.run.dir={folder}"], env={**os.environ, **environment},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_with_the_token_joins_and_one_without_is_refused(tmp_path: Path, environment: dict[str, str]) -> None:
    done = run(tmp_path / "joined", environment)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "joined" / "summary.json").read_text())
    assert (told["weight_sync"]["scheme"], told["status"]) == ("ray", "finished")
    (tmp_path / "other").mkdir()
    done = run(tmp_path / "refused", {**environment, "HOME": str(tmp_path / "other")})
    assert done.returncode == 1 and "no authentication token was found" in done.stderr


# --- a signal stops train.py as it stops all others, whatever Ray does with signals ---


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
