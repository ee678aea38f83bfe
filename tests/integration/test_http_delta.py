"""Differences over HTTP: what travels, that the result is exact, and what happens where there is no base."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from http_engines import engines, refuse_next, start_engine, stop_engine, trainer
from torch import Tensor, nn

import wsync
from wsync.testing import WorkerPool
from wsync.testing.commands import WorkerState
from wsync.transforms import Cast, Delta

pytest.importorskip("zstandard", reason="the extra [delta] is not installed")


class Policy(nn.Module):
    """Two layers, tied ends, an empty tensor, integers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.Sequential(nn.Linear(32, 96), nn.Linear(96, 32), nn.BatchNorm1d(32))
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight
        self.empty = nn.Parameter(torch.empty(0))


def step(model: nn.Module, lr: float = 1e-4) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += lr * torch.randn_like(parameter)


def digest(weights: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def expected(model: nn.Module) -> str:
    return digest(Cast("bfloat16")(model.state_dict()))


def loaded(state: WorkerState) -> str:
    with wsync.gate():
        return digest(state.kept["loaded"])


@contextmanager
def sender(urls: Any, model: nn.Module, **options: Any) -> Iterator[wsync.HTTPWeightSyncScheme]:
    with trainer(urls, model, send_transform=[Cast("bfloat16"), Delta()], **options) as scheme:
        yield scheme


def sent_bytes(scheme: wsync.HTTPWeightSyncScheme) -> int:
    """Send; return how many bytes an engine was sent."""
    report = scheme.send()
    assert report is not None
    return report.bytes


def test_an_engine_without_the_base_gets_the_full_version(pool: WorkerPool) -> None:
    model = Policy()
    with engines(pool, 2) as (workers, urls), sender(urls, model) as scheme:
        step(model)
        small = sent_bytes(scheme)
        workers[1].call(stop_engine)
        workers[1].call(start_engine, int(urls[1].rsplit(":", 1)[1]))
        step(model)
        assert sent_bytes(scheme) > 2 * small  # engine 1 has been started again
        assert workers.call(loaded) == [expected(model)] * 2
        workers[0].call(refuse_next)
        step(model)
        with pytest.raises(wsync.WorkerFailed, match="the engine refuses"):
            scheme.send()
        step(model)
        assert sent_bytes(scheme) > 2 * small  # engine 0 has not said that it has the version before
        assert workers.call(loaded) == [expected(model)] * 2
        step(model)
        assert sent_bytes(scheme) < 1.5 * small
        assert workers.call(loaded) == [expected(model)] * 2
