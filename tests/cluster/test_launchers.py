"""The launchers of ``scripts/``: one starts a cluster and trains in it; another one names the extra that is missing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_trains_in_a_cluster_that_has_rays_default_token(tmp_path: Path) -> None:
    head = f"127.0.0.1:{free_port()}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(tmp_path), "PYTHON": sys.executable, "PORT": head.partition(":")[2]}
    environment["RAY_raylet_start_wait_time_s"] = "180"  # 30 by default, on a machine with much to do too few
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    launcher = SCRIPTS / "launch_ray.sh"
    options = ["--block", "--node-ip-address=127.0.0.1", "--include-dashboard=false", "--num-cpus=3"]
    command = [launcher, "head", *options]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as node:
        try:
            assert node.stdout is not None
            assert any("Ray runtime started" in line for line in node.stdout), "no head"
            assert (tmp_path / ".ray" / "auth_token").stat().st_size > 0
            settings = ["num_workers=2", "total_frames=1024", "logger=none", f"hydra.run.dir={tmp_path}/run"]
            done = subprocess.run(
                [launcher, "run", *settings],
                env={**environment, "HEAD": head},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
        finally:
            node.terminate()  # ends all of its processes
    told = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert told["status"] == "finished" and told["weight_sync"]["scheme"] == "ray"


def test_the_slurm_launcher_names_its_extra(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # without installed packages
    python.chmod(0o755)
    done = subprocess.run(
        [SCRIPTS / "launch_slurm.sh", "seed=0,1"], env={**os.environ, "PYTHON": str(python)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "pip install -e '.[slurm]'" in done.stderr
