"""Another user's process on the trainer's machine, without the key, given all that any user can see.

The attacker connects to every port that it finds: `integration/test_attackers.py` runs these in their own network.
"""

from __future__ import annotations

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

ATTACKER = Path(__file__).parent / "attacker.py"
VALUE = 1234.5
SECRET = torch.full((16,), VALUE).numpy().tobytes()
"""Sixteen weights in a row."""


class Attack:
    """An attacker at work.

    Attributes:
        outcome: what it has got, once it has ended.
    """

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ATTACKER), SECRET.hex()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        self.outcome: dict[str, Any] = {}

    def end(self) -> None:
        self.outcome = json.loads(self.process.communicate()[0])


@contextmanager
def attack() -> Iterator[Attack]:
    attacker = Attack()
    try:
        yield attacker
    finally:
        attacker.end()


def model_of(value: float) -> nn.Linear:
    model = nn.Linear(64, 64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


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
    """The pipe to a worker's process."""
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
        with attack() as attacker, wsync.DistributedWeightSyncScheme(timeout=30.0, **options) as scheme:
            scheme.init_on_sender("policy", model=model_of(VALUE), num_workers=1)
            time.sleep(0.3)  # the attacker has connected to the scheme's port
            line.send(scheme)
            try:
                scheme.connect()
                assert line.recv() == VALUE
            except wsync.WeightSyncError:  # it was in a pair of gloo's
                line.recv()
        assert attacker.outcome["made"] >= 5 and not attacker.outcome["found"]
