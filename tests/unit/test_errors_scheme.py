"""Schemes by name, their options, and one family of errors."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from torch import nn

import wsync
from wsync.testing.models import Small


def test_one_family() -> None:
    for kind in (wsync.LayoutMismatch, wsync.NotConnected, wsync.SyncTimeout, wsync.WorkerDied, wsync.WorkerFailed):
        assert issubclass(kind, wsync.WeightSyncError)
        error = pickle.loads(pickle.dumps(kind("the cause")))
        assert (error.workers, str(error)) == ({}, "the cause")
    assert issubclass(wsync.SyncTimeout, TimeoutError)


@pytest.mark.parametrize("name", ["shared_mem", "multiprocess", "distributed", "rpc", "ray", "none"])
def test_from_backend(name: str) -> None:
    scheme = wsync.WeightSyncScheme.from_backend(name, strategy="state_dict", timeout=3.0)
    assert scheme.name == name and scheme.timeout == 3.0 and scheme.strategy.extract_as == "state_dict"
    scheme.shutdown()
    scheme.shutdown()


def test_bad_options() -> None:
    with pytest.raises(ValueError, match=r"distributed, http, multiprocess, none, ray, .*rpc, shared_mem"):
        wsync.WeightSyncScheme.from_backend("carrier_pigeon")
    with pytest.raises(ValueError, match="timeout"):
        wsync.SharedMemWeightSyncScheme(timeout=0)
    with pytest.raises(ValueError, match="installed"):
        wsync.SharedMemWeightSyncScheme(acknowledge="maybe")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="strategy"):
        wsync.MultiProcessWeightSyncScheme("json")


@pytest.mark.parametrize("model", [None, Small()])
def test_none_carries_nothing(model: Any) -> None:
    scheme = wsync.NoWeightSyncScheme()
    scheme.init_on_sender("policy", model=model)
    scheme.connect()
    scheme.continue_from(7)
    assert scheme.send() is None and scheme.version == 0
    assert scheme.receive() is False
    assert wsync.synchronize({scheme: nn.Linear(1, 1)}) == {}
    with wsync.NoWeightSyncScheme() as receiver:
        receiver.init_on_receiver("policy", model=Small())
        assert receiver.pull() == 0
