"""A trainer's program that ends by an error, and has shut nothing down: its workers do not keep it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
import torch.nn as nn
from torch import multiprocessing as mp
import wsync


def worker(schemes):
    for name, scheme in schemes.items():
        scheme.init_on_receiver(name, model=nn.Linear(4, 2), worker_idx=0)
        scheme.connect()
    for name, scheme in schemes.items():
        try:
            scheme.receive()
        except wsync.NotConnected:
            print(name, flush=True)


if __name__ == "__main__":
    schemes = {name: wsync.WeightSyncScheme.from_backend(name) for name in sys.argv[1:]}
    for name, scheme in schemes.items():
        scheme.init_on_sender(name, model=nn.Linear(4, 2), num_workers=1)
    mp.get_context("spawn").Process(target=worker, args=(schemes,)).start()
    for scheme in schemes.values():
        scheme.connect()
    raise SystemExit("the trainer's own fault")
"""


def test_workers_are_told_when_a_trainer_ends_by_an_error(tmp_path: Path) -> None:
    backends = ["shared_mem", "multiprocess", "distributed"]
    script = tmp_path / "trainer.py"
    script.write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script, *backends], capture_output=True, text=True, timeout=250, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stdout.split(), done.stderr) == (1, backends, "the trainer's own fault\n")


IN_ANOTHER = """
import multiprocessing as mp
import sys


def worker(scheme, idx):
    import torch.nn as nn
    import wsync
    scheme.init_on_receiver("policy", model=nn.Linear(4, 2), worker_idx=idx)
    scheme.connect()
    try:
        scheme.receive()
    except wsync.NotConnected:
        print("told", flush=True)


def train():
    import torch.nn as nn
    import wsync
    scheme = wsync.SharedMemWeightSyncScheme()
    scheme.init_on_sender("policy", model=nn.Linear(4, 2), num_workers=1)
    mp.get_context("spawn").Process(target=worker, args=(scheme, 0)).start()
    scheme.connect()
    raise RuntimeError("the trainer's own fault")


def collect():
    import wsync
    from collectors import GymEnv, MultiSyncCollector
    from learning import make_policy
    env = GymEnv("CartPole-v1")
    policy = make_policy(env.observation_spec["observation"], env.action_spec)
    schemes = {"policy": wsync.SharedMemWeightSyncScheme()}
    envs = [lambda: GymEnv("CartPole-v1")]
    for _ in MultiSyncCollector(envs, policy, frames_per_batch=8, weight_sync_schemes=schemes):
        raise RuntimeError("the trainer's own fault")


if __name__ == "__main__":
    trainer = mp.get_context(sys.argv[2]).Process(target=globals()[sys.argv[1]])
    trainer.start()
    trainer.join()
    sys.exit(trainer.exitcode)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("what", "said", "method"), [("train", "told\n", "fork"), ("collect", "", "spawn")])
def test_a_trainer_that_multiprocessing_has_started_ends_as_well(
    tmp_path: Path, what: str, said: str, method: str
) -> None:
    """What is to be run at exit is not run there, and its workers are joined all the same."""
    script = tmp_path / "trainer.py"
    script.write_text(IN_ANOTHER, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script, what, method], capture_output=True, text=True, timeout=250, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, said)
    assert done.stderr.endswith("RuntimeError: the trainer's own fault\n")
