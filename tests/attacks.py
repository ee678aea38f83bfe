"""Another user's process on the trainer's machine, without the key, given all that any user can see.

The attacker connects to every port that it finds: `integration/test_network.py` runs these in their own network.
"""

import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wsync
from wsync.testing.models import fill

ATTACKER = Path(__file__).parent / "attacker.py"
VALUE = 1234.5
SECRET = torch.full((16,), VALUE).numpy().tobytes()
"""Sixteen weights in a row."""


@contextmanager
def attack() -> Iterator[dict[str, Any]]:
    """An attacker is at work; gives what it has got, once it has ended."""
    outcome, pipe = dict[str, Any](), subprocess.PIPE
    process = subprocess.Popen([sys.executable, str(ATTACKER), SECRET.hex()], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    try:
        yield outcome
    finally:
        outcome |= json.loads(process.communicate()[0])


def follow(line: Any) -> None:
    """Connect by each scheme that comes, and say what has come with it."""
    for scheme in iter(line.recv, None):
        model = nn.Linear(64, 64)
        scheme.init_on_receiver("policy", model=model, worker_idx=0)
        try:
            scheme.connect()
            line.send(model.bias[0].item())
        except (wsync.WeightSyncError, ConnectionError) as error:
            line.send(f"{type(error).__name__}: {error}")
        scheme.shutdown()


@pytest.fixture
def line() -> Iterator[Any]:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=follow, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    yield ours
    ours.send(None)
    process.join(10.0)
    process.kill()


@pytest.mark.parametrize("options", [{}, {"shared_memory": False}, {"shared_memory": False, "inline_bytes": 0}])
def test_a_process_that_connects_to_every_port_gets_no_weights(line: Any, options: dict[str, Any]) -> None:
    for _ in range(4):
        with attack() as got, wsync.DistributedWeightSyncScheme(timeout=30.0, **options) as scheme:
            scheme.init_on_sender("policy", model=fill(nn.Linear(64, 64), VALUE), num_workers=1)
            time.sleep(0.3)  # the attacker has connected to the scheme's port
            line.send(scheme)
            try:
                scheme.connect()
                assert line.recv() == VALUE
            except wsync.WeightSyncError:  # it was in a pair of gloo's
                line.recv()
        assert got["made"] >= 5 and not got["found"]
