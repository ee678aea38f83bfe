"""Programs that have a Ray of their own: ``scripts/launch_ray.sh``, ``train.py``, and what ``ray.shutdown`` ends."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from stopping import left_of
from tensordict import TensorDict
from torch import nn

import wsync
from collectors import GymEnv, RayModuleTransform
from collectors.distributed import RayCollector

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "scripts" / "launch_ray.sh"
SMALL = ["num_workers=1", "total_frames=64", "frames_per_batch=32", "num_envs=2", "logger=none"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_cluster")]


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


def test_a_run_with_the_token_joins_and_one_without_is_refused(tmp_path: Path, environment: dict[str, str]) -> None:
    done = run(tmp_path / "joined", environment)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "joined" / "summary.json").read_text())
    assert (told["weight_sync"]["scheme"], told["status"]) == ("ray", "finished")
    (tmp_path / "other").mkdir()
    done = run(tmp_path / "refused", {**environment, "HOME": str(tmp_path / "other")})
    assert done.returncode == 1 and "no authentication token was found" in done.stderr


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


def actor() -> Any:
    class Worker:
        """A user's actor."""

        def __init__(self) -> None:
            self.policy = nn.Linear(1, 1)

    return ray.remote(Worker).options(num_cpus=0).remote()


def test_wrong_options_of_actors_leave_no_cluster() -> None:
    with pytest.raises(ValueError, match="gpu"):
        RayCollector([lambda: GymEnv("CartPole-v1")], frames_per_batch=8, resources={"gpu": 1})
    assert not ray.is_initialized()


def test_what_ray_shutdown_has_ended_says_so_and_lets_the_next_ray_be() -> None:
    idle = RayCollector([lambda: GymEnv("CartPole-v1")], frames_per_batch=8)  # has started the cluster
    asked = RayCollector([lambda: GymEnv("CartPole-v1")], frames_per_batch=8)
    rewards = RayModuleTransform(nn.Identity, [("next", "reward")], [("next", "reward")])
    env = GymEnv("CartPole-v1", transforms=[rewards])
    scheme = wsync.RayWeightSyncScheme(timeout=60.0)
    scheme.init_on_sender("policy", model=nn.Linear(1, 1), actors=[actor()])
    scheme.connect()

    ray.shutdown()
    with pytest.raises(wsync.WorkerDied, match=r"worker 0 .*ray\.shutdown\(\)"):
        next(asked)
    with pytest.raises(wsync.NotConnected, match="cannot be reached"):
        env.step(TensorDict({"action": torch.tensor(0)}, []))
    with pytest.raises(wsync.NotConnected, match=r"ray\.shutdown\(\)"):
        scheme.readmit(0)
    with pytest.raises(wsync.WeightSyncError):
        scheme.send()
    assert not ray.is_initialized(), "no other Ray has been started"

    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    for of_the_other_ray in (scheme, rewards, idle):
        of_the_other_ray.shutdown()
    assert ray.is_initialized()
    ray.shutdown()
