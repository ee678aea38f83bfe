"""A worker cannot install an update: it keeps its model, the trainer gets the traceback, the next update works."""

from __future__ import annotations

import torch
from backends import BuiltIn
from cells import VICTIM, Cell

import wsync
from wsync.testing import commands
from wsync.testing.commands import WorkerState
from wsync.testing.models import Small, WithExtraState


def test_extra_state_cannot_be_set(cell: Cell, backend: BuiltIn) -> None:
    """A module's `set_extra_state` raises in one worker, half-way through. Its model is put back as it was, the
    traceback arrives in the trainer, the others have the update."""
    with backend.connected(make=WithExtraState) as session:
        before = session.digests()[VICTIM]
        session.model.state = "refuse 1"
        with cell.detects(wsync.WorkerFailed, r"(?s)worker 1.*set_extra_state.*ArithmeticError") as failed:
            session.update(2)
        assert set(failed.value.workers) == {VICTIM}
        assert session.digests()[VICTIM] == before
        assert session.outputs() == [2, 1]
        session.model.state = "accepted"
        with cell.recovers():
            session.update(3)
            assert session.outputs() == [3, 3]


def reshape(state: WorkerState, size: int) -> None:
    state.models["policy"].weight = torch.nn.Parameter(torch.full((size,), -1.0))


def test_model_has_changed_shape(cell: Cell, backend: BuiltIn) -> None:
    """A worker's model is given another parameter, of another shape. The next update is refused there, with the name
    and both shapes; when the model fits again, the next one works."""
    with backend.connected() as session:
        session.workers[VICTIM].call(reshape, 9)
        with cell.detects(wsync.WorkerFailed, r"(?s)worker 1.*LayoutMismatch.*weight"):
            session.update(2)
        assert session.workers[0].call(commands.output) == [2.0] * 4
        session.workers[VICTIM].call(reshape, 4)
        with cell.recovers():
            session.update(3)
            assert session.outputs() == [3, 3]


def test_trainer_sends_another_shape(cell: Cell, backend: BuiltIn) -> None:
    """The trainer sends weights of another shape. The send refuses them before anything is transferred."""
    with backend.connected() as session:
        with cell.detects(wsync.LayoutMismatch, "weight"):
            session.scheme.send(Small(9))
        assert session.outputs() == [1, 1]
        with cell.recovers():
            session.update(2)
            assert session.outputs() == [2, 2]
