"""A worker cannot take an update: it keeps its model, the trainer gets the traceback, the next one works."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from contract_models import Small, Tail
from damage import corrupt
from matrix import Cell
from stage import VICTIM, Scene, detected, recovered

import wsync

pytestmark = pytest.mark.above_the_ends


def test_set_extra_state_raises(cell: Cell, scene: Scene) -> None:
    """A module's `set_extra_state` raises in one worker, half-way through. Its model is put back as it was, the
    traceback arrives in the trainer, the others have the update."""
    with scene.play(Tail) as stage:
        before = stage.victim.call("digest")
        stage.model.note = "refuse 1"
        with detected(cell, wsync.WorkerFailed, r"(?s)worker 1.*set_extra_state.*ArithmeticError") as failed:
            stage.send(2)
        assert set(failed.value.workers) == {VICTIM}
        assert stage.victim.call("digest") == before
        assert stage.workers[0].call("forward")[0] == 2
        stage.model.note = "good"
        with recovered(cell):
            stage.send(3)
            assert stage.all_see(3)


def reshape(host: Any, size: int) -> None:
    with wsync.gate():
        host.models["policy"].weight = torch.nn.Parameter(torch.full((size,), -1.0))


def test_model_has_changed_shape(cell: Cell, scene: Scene) -> None:
    """Somebody gives a worker's model another parameter, of another shape. The next update is refused there, with
    the name and both shapes; when the model fits again, the next one works."""
    with scene.play() as stage:
        stage.victim.call("run", reshape, 9)
        with detected(cell, wsync.WorkerFailed, r"(?s)worker 1.*LayoutMismatch.*weight"):
            stage.ask(2)
        assert stage.workers[0].call("forward")[0] == 2
        assert stage.victim.call("forward") == [-1.0] * 9
        stage.victim.call("run", reshape, 4)
        with recovered(cell):
            stage.ask(3)
            assert stage.all_see(3)


def test_trainer_sends_another_shape(cell: Cell, scene: Scene) -> None:
    """The trainer sends weights of another shape. The send refuses them before anything is on its way."""
    with scene.play() as stage:
        with detected(cell, wsync.LayoutMismatch, "weight"):
            stage.scheme.send(Small(9))
        assert stage.all_see(1)
        with recovered(cell):
            stage.send(2)
            assert stage.all_see(2)


def test_payload_corrupted(cell: Cell, scene: Scene, make_scheme: Any) -> None:
    """One byte of an update is flipped on its way (with `checksum=True`). Whoever gets it refuses it and goes on with
    the version before; the trainer hears that it arrived corrupt. The next update works."""
    if "checksum" not in inspect.signature(make_scheme.func).parameters:
        pytest.skip("needs the option checksum")
    with Scene(partial(make_scheme, checksum=True)).play() as stage:
        with corrupt(stage), detected(cell, wsync.WorkerFailed, "(?s)worker 1.*arrived corrupt") as failed:
            stage.ask(2)
        spared = set(range(2)) - set(failed.value.workers)  # who shares memory shares the damage
        assert [worker.call("forward")[0] for worker in stage.workers.workers] == [
            2 if i in spared else 1 for i in (0, 1)
        ]
        with recovered(cell):
            stage.ask(3)
            assert stage.all_see(3)
