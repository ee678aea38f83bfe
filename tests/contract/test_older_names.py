"""Older method names: workers and models that are registered one by one, and transports that acknowledge apart."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import Distributed
from small_models import policy_of
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

import wsync
from wsync.testing import WorkerError, WorkerGroup, WorkerPool
from wsync.testing.commands import WorkerState

TIMEOUT = 60.0
"""Seconds for what takes milliseconds."""


def register(state: WorkerState, make: Callable[..., Any], pipe: Any) -> bool:
    """Register a model and the pipe with a receiver of the worker's own; whether weights are there already."""
    scheme, model = make(), nn.Linear(4, 2)
    receiver = scheme.create_receiver()
    receiver.register_model(model)
    receiver.register_worker_transport(pipe)
    state.schemes["policy"], state.models["policy"], state.kept["receiver"] = scheme, model, receiver
    return receiver.receive(timeout=0.001)


def received(state: WorkerState) -> tuple[bool, float]:
    got = state.kept["receiver"].receive(timeout=TIMEOUT)
    return got, state.models["policy"].bias[0].item()


def apply_own(state: WorkerState, value: float) -> float:
    state.kept["receiver"].apply_weights(policy_of(value).state_dict())
    return state.models["policy"].bias[0].item()


def register_again(state: WorkerState) -> None:
    state.kept["receiver"].register_model(nn.Linear(4, 2))


def test_workers_that_register_one_by_one(make: Callable[..., Any], workers: WorkerGroup) -> None:
    pairs = [multiprocessing.Pipe() for _ in workers]
    with make() as scheme:
        sender = scheme.create_sender()
        for index, (ours, _) in enumerate(pairs):
            sender.register_worker(index, ours)
        for worker, (_, theirs) in zip(workers, pairs, strict=True):
            assert worker.call(register, make, theirs) is False  # the sender has not sent
            worker.start(received)
        report = sender.update_weights(policy_of(2.0))
        assert report is not None and dict(report.workers) == {0: 1, 1: 1}
        assert workers.results() == [(True, 2.0)] * 2
        sender.update_weights(policy_of(3.0).state_dict())
        assert workers.call(received) == [(True, 3.0)] * 2
        assert workers.call(apply_own, 9.0) == [9.0] * 2
        sender.send(policy_of(4.0))
        assert workers.call(received) == [(True, 4.0)] * 2
        with pytest.raises(RuntimeError, match="already initialised on the sender"):
            sender.register_worker(2, pairs[0][0])
        with pytest.raises(WorkerError, match="already initialised on the receiver"):
            workers[0].call(register_again)


def test_a_transport_says_that_its_worker_is_not_connected_yet(make: Callable[..., Any]) -> None:
    with make() as scheme:
        scheme.init_on_sender("policy", model=nn.Linear(4, 2), num_workers=1)
        assert not scheme.sender_transports[0].check_connection()


def test_a_transport_over_queues() -> None:
    weights, acks = queue.Queue(), queue.Queue()
    sender, worker = wsync.MPTransport(weights, acks, timeout=0.05), wsync.MPTransport(weights, acks)
    model = nn.Linear(4, 2)
    sender.send_weights_async("policy", policy_of(2.0))
    with pytest.raises(wsync.SyncTimeout):
        sender.wait_ack()
    assert worker.receive_weights(TIMEOUT, model=model) is not None
    sender.wait_ack()
    sender.wait_ack()  # nothing is left to wait for
    assert torch.equal(model.weight, policy_of(2.0).weight) and sender.check_connection()


def take_from_group(state: WorkerState, port: int) -> list[float]:
    store, model = TCPStore("127.0.0.1", port, is_master=False), nn.Linear(4, 2)
    transport = wsync.DistributedTransport(weights_buffer=model, store=store)
    seen = []
    for _ in range(3):
        assert transport.receive_weights(TIMEOUT, model=model) is not None
        seen.append(model.bias[0].item())
    return seen


def test_a_transport_over_a_process_group(pool: WorkerPool) -> None:
    Distributed.pool = pool
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pool.group(1) as workers:
        workers[0].start(take_from_group, store.port)
        transport = wsync.DistributedTransport(weights_buffer=policy_of(0.0), store=store)
        assert not transport.check_connection()
        transport.send_weights("policy", policy_of(1.0))
        for value in (2.0, 3.0):
            transport.send_weights_async("policy", policy_of(value))
        transport.wait_ack()
        assert workers[0].result() == [1.0, 2.0, 3.0] and transport.check_connection()


def test_a_transport_that_carries_nothing() -> None:
    transport = wsync.NoWeightSyncScheme().create_transport()
    transport.send_weights_async("policy", policy_of(1.0))
    transport.wait_ack()
    assert transport.check_connection() is True
