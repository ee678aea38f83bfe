"""Weights through queues of the user's own."""

from __future__ import annotations

import multiprocessing
import queue
import threading
from typing import Any

import pytest
import torch
from small_models import linear
from tensordict import TensorDict
from torch import nn

from wsync import MPTransport, MultiProcessWeightSyncScheme, SyncTimeout, WeightStrategy, WorkerFailed


def work(weights: Any, answers: Any, said: Any) -> None:
    """A worker: takes weights until it is given those of another model."""
    model, line = nn.Linear(2, 2), MPTransport(weights, answers)
    buffer = TensorDict.from_module(linear(0.0)).data
    strategy = WeightStrategy("tensordict")
    line.setup_connection_and_weights_on_receiver(worker_idx=0, weights=buffer, model=model, strategy=strategy)
    said.put([one.sum().item() for one in (model.weight, buffer["weight"])])
    received = line.receive_weights(60.0, model=model)
    said.put(None if received is None else received["bias"].tolist())
    try:
        line.receive_weights(60.0, model=model)
    except ValueError as error:
        said.put(f"{type(error).__name__}, and still {model.weight.sum().item()}")


def test_a_worker_answers_what_it_has_applied() -> None:
    context = multiprocessing.get_context("forkserver")
    weights, answers, said = context.Queue(), context.Queue(), context.Queue()
    worker = context.Process(target=work, args=(weights, answers, said))
    worker.start()
    try:
        line = MPTransport(weights, answers, timeout=60.0)
        line.setup_connection_and_weights_on_sender()
        line.send_weights(linear(1.0))
        assert said.get(timeout=60.0) == [4.0, 4.0]
        line.send_weights(linear(2.0).state_dict())
        assert said.get(timeout=60.0) == [2.0, 2.0]
        with pytest.raises(WorkerFailed, match="LayoutMismatch"):
            line.send_weights(nn.Linear(3, 2))
        assert said.get(timeout=60.0) == "LayoutMismatch, and still 8.0"
    finally:
        worker.join(60.0)
        worker.kill()
    assert worker.exitcode == 0


def test_a_scheme_makes_a_line_over_queues() -> None:
    weights = queue.Queue()
    line = MultiProcessWeightSyncScheme(timeout=0.05).create_transport(weight_queue=weights, ack_queue=queue.Queue())
    assert isinstance(line, MPTransport)
    with pytest.raises(SyncTimeout, match=r"within 0\.05 s"):
        line.send_weights(linear(1.0))
    assert torch.equal(weights.get(timeout=1.0)[1]["bias"], torch.ones(2))
    scheme, copy = MultiProcessWeightSyncScheme(), nn.Linear(2, 2)
    scheme.create_transport(weight_queue=weights).send_weights(linear(2.0))
    assert scheme.create_transport(weight_queue=weights).receive_weights(timeout=1.0, model=copy) is not None
    assert torch.equal(copy.weight, linear(2.0).weight)


def test_a_receive_without_a_timeout_waits_until_weights_arrive() -> None:
    line = MPTransport(queue.Queue())
    assert line.receive_weights(0.0) is None and line.receive_weights(0.15) is None
    threading.Timer(0.25, line.send_weights, [{"w": torch.ones(2)}]).start()
    received = line.receive_weights(timeout=None)
    assert received is not None and received["w"].tolist() == [1.0, 1.0]


def test_close_ends_a_receive() -> None:
    line = MPTransport(queue.Queue())
    threading.Timer(0.05, line.close).start()
    with pytest.raises(ConnectionError, match="closed"):
        line.receive_weights(timeout=None)
