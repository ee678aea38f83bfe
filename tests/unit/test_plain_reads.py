"""Parameters that are read outside the gate may be of two versions; but no thread may wait for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
import threading
import torch
from torch import nn
from wsync.weights.binding import Binding
from wsync.weights.layout import Layout
from wsync.weights.snapshot import Snapshot

model = nn.Linear(4, 2)
layout = Layout.of(Snapshot({name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}))
buffers = [layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8)) for _ in range(2)]
binding = Binding(model, layout)
installing = True
sys.setswitchinterval(1e-5)


def install():
    while installing:
        for views in buffers:
            binding.install(views)


thread = threading.Thread(target=install)
thread.start()
for _ in range(50_000):
    model.weight.sum()
installing = False
thread.join()
print("done")
"""


def test_reads_outside_the_gate_and_installs_do_not_deadlock() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=250, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
