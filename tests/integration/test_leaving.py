"""A trainer's program that ends by an error, and has shut nothing down: its workers do not keep it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
