"""Transports without a scheme, as the reference documents describe them: see ``docs/api.md``."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.distributed import (
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

import wsync
from wsync.testing import WorkerPool
from wsync.testing.commands import WorkerState

TIMEOUT = 60.0
"""Seconds for what takes milliseconds."""


@pytest.fixture
def store() -> Iterator[Any]:
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def follow_group(state: WorkerState, kind: type[Any], port: int) -> bool:
    """Receive by a transport of ``kind`` without a scheme, before anything is sent; returns whether it timed out."""
    model = nn.Linear(4, 2)
    buffer: Any = TensorDict.from_module(model)
    buffer = buffer.detach().clone()
    strategy = wsync.WeightStrategy("tensordict")
    transport = kind(store=TCPStore("127.0.0.1", port, is_master=False))
    transport.setup_connection_and_weights_on_receiver(worker_idx=0, weights=buffer, model=model, strategy=strategy)
    state.kept["transport"] = transport, buffer, model, strategy
    return all(
        transport.receive_weights(timeout=0.02, weights=buffer, model=model, strategy=strategy) is None
        for _ in range(3)
    )


def follow_on(state: WorkerState) -> tuple[list[float], list[float]]:
    """Receive the next version, without a limit of time."""
    transport, buffer, model, strategy = state.kept["transport"]
    assert transport.receive_weights(timeout=None, weights=buffer, model=model, strategy=strategy) is not None
    return model.bias.tolist(), buffer["bias"].tolist()


@pytest.mark.parametrize("kind", [wsync.DistributedTransport, wsync.RPCTransport, wsync.RayTransport])
def test_a_transport_over_a_group_returns_none_at_its_timeout(kind: type[Any], pool: WorkerPool, store: Any) -> None:
    model = nn.Linear(4, 2)
    with pool.group(1) as workers:
        workers[0].start(follow_group, kind, store.port)
        transport = kind(weights_buffer=model, store=store)
        transport.setup_connection_and_weights_on_sender()
        assert workers[0].result()
        nn.init.constant_(model.bias, 3.0)
        transport.send_weights(model)  # the receive that has timed out takes it
        assert workers[0].call(follow_on) == ([3.0, 3.0], [3.0, 3.0])
        workers[0].start(follow_on)
        nn.init.constant_(model.bias, 4.0)
        transport.send_weights(model.state_dict())
        assert workers[0].result() == ([4.0, 4.0], [4.0, 4.0])


def follow_shared(state: WorkerState, transport: wsync.SharedMemTransport) -> list[Any]:
    """Receive the version that there is, then none, by a shared-memory transport without a scheme."""
    model = nn.Linear(4, 2)
    received = [transport.receive_weights(timeout=TIMEOUT, model=model), transport.receive_weights(timeout=0.02)]
    return [value is not None for value in received] + [model.bias.tolist()]


def test_a_shared_memory_transport_without_a_scheme() -> None:
    model, own = nn.Linear(4, 2), WorkerState()
    transport = wsync.SharedMemTransport()
    with pytest.raises(wsync.NotConnected, match="register_weights"):
        transport.send_weights(model)
    transport.register_weights(model)
    nn.init.constant_(model.bias, 2.0)
    transport.send_weights(model)
    assert follow_shared(own, transport) == [True, False, [2.0, 2.0]]
    assert [list(weights["bias"]) for weights in transport.unique_weights] == [[2.0, 2.0]]


def test_a_transport_keeps_no_model_and_no_strategy() -> None:
    weights, transport = nn.Linear(4, 2), wsync.MPTransport(queue.Queue())
    first, second = nn.Linear(4, 2), nn.Linear(4, 2)
    received = []
    for model, strategy in ((first, wsync.WeightStrategy("tensordict")), (second, wsync.WeightStrategy("state_dict"))):
        nn.init.normal_(weights.weight)
        transport.send_weights(weights)
        received.append(transport.receive_weights(0.0, model=model, strategy=strategy))
        assert torch.equal(model.weight, weights.weight)
    assert [type(given) for given in received] == [TensorDict, dict]
    assert not torch.equal(first.weight, second.weight)
