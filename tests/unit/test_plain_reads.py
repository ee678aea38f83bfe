"""Parameters that are read outside the gate may be of two versions; but no thread may wait for ever."""

from __future__ import annotations

from pathlib import Path

from programs import run_program

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


def test_reads_outside_the_gate_and_installs_do_not_deadlock(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_program(tmp_path / "program.py", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
