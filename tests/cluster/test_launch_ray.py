"""``scripts/launch_ray.sh``: a head, a run that joins it, and a run without the cluster's token."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stopping import left_of

LAUNCH = Path(__file__).parents[2] / "scripts" / "launch_ray.sh"
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
