"""Models that cannot be carried are refused by every backend, with an error that names the tensors, at both ends."""

from __future__ import annotations

import pytest
import torch
from backends import BuiltIn
from torch import nn

import wsync
from wsync.testing import WorkerError, commands
from wsync.testing.models import Small, fill


class Overlapping(Small):
    """Two parameters that have two of their values in common."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(6)
        self.weight, self.other = nn.Parameter(memory[:4]), nn.Parameter(memory[2:])


class Separate(Small):
    """Two parameters of the same names and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.zeros(4))


OVERLAP = r"(?s)'weight' and 'other'.*overlap"


def test_overlapping_parameters_of_the_sender_are_refused(backend: BuiltIn) -> None:
    with backend.make_scheme(timeout=20.0) as scheme:
        scheme.init_on_sender("policy", model=fill(Overlapping(), 1), num_workers=1)
        with pytest.raises(wsync.LayoutMismatch, match=OVERLAP):
            scheme.connect()


def test_overlapping_parameters_of_a_worker_are_refused(backend: BuiltIn) -> None:
    with backend.workers(1) as workers, backend.make_scheme(timeout=20.0) as scheme:
        scheme.init_on_sender("policy", model=fill(Separate(), 1), num_workers=1)
        workers[0].start(commands.join, scheme, Overlapping, 0, "policy")
        with pytest.raises(wsync.WorkerFailed, match=OVERLAP):
            scheme.connect()
        with pytest.raises(WorkerError, match=OVERLAP):
            workers[0].result()


def test_overlapping_parameters_in_later_weights_are_refused(backend: BuiltIn) -> None:
    with backend.connected(1, Separate, init={}) as session:
        with pytest.raises(wsync.LayoutMismatch, match=OVERLAP):
            session.scheme.send(fill(Overlapping(), 2))
        session.send(3)
        assert session.outputs() == [3]
