"""Models on a GPU at both ends. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from backends import BuiltIn

from wsync.testing.models import Small

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_gpu() -> Small:
    return Small().cuda()


def test_updates_between_gpus(backend: BuiltIn) -> None:
    with backend.connected(make=on_gpu) as session:
        for value in (2.0, 3.0):
            session.send(value)
            assert session.outputs() == [value] * len(session.workers)
