"""The older names: senders and receivers, and pipes in place of a pickled scheme and a ``connect``."""

import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import policy_of
from tensordict import TensorDict
from torch import nn

import wsync
from wsync.testing import WorkerGroup, commands
from wsync.testing.commands import WorkerState
from wsync.testing.hooks import TIMEOUT
from wsync.testing.models import Small, fill

Make = Callable[..., Any]


def pipes_to(workers: WorkerGroup) -> tuple[list[Any], list[Any]]:
    pairs = [multiprocessing.Pipe() for _ in workers]
    return [ours for ours, _ in pairs], [theirs for _, theirs in pairs]


def follow(state: WorkerState, make: Make, pipe: Any, model_id: str = "policy", width: int = 4) -> int | None:
    """Initialise a scheme of the worker's own with the pipe; returns the worker's index."""
    state.models[model_id] = nn.Linear(width, 2)
    state.schemes[model_id] = scheme = make()
    scheme.init_on_worker(model_id=model_id, pipe=pipe, model=state.models[model_id])
    return scheme.worker_idx


def poll(state: WorkerState, model_id: str = "policy") -> int:
    """Call ``receive`` until it returns True, as an acting worker does; returns how often it returned False."""
    receiver, empty = state.schemes[model_id].get_receiver(), 0
    until = time.monotonic() + TIMEOUT
    while not receiver.receive(timeout=0.001):
        assert time.monotonic() < until
        empty += 1
    return empty


def received(state: WorkerState, timeout: float | None) -> bool:
    return state.schemes["policy"].get_receiver().receive(timeout)


def acted(state: WorkerState, model_id: str = "policy") -> list[float]:
    with torch.no_grad():
        return state.models[model_id](torch.ones(4)).tolist()


def test_state_dicts_through_pipes(workers: WorkerGroup) -> None:
    """The first example of the documentation."""
    scheme = wsync.MultiProcessWeightSyncScheme(strategy="state_dict")
    ours, theirs = pipes_to(workers)
    scheme.init_on_sender(model_id="policy", pipes=ours)
    for worker, pipe in zip(workers, theirs, strict=True):
        worker.start(follow, wsync.MultiProcessWeightSyncScheme, pipe)
    assert workers.results() == [0, 1]
    assert workers.call(received, 0.001) == [False, False]  # nothing was sent
    for worker in workers:
        worker.start(poll)
    sender, policy = scheme.get_sender(), policy_of(3.0)
    report = sender.send(policy.state_dict())
    assert report is not None and dict(report.workers) == {0: 1, 1: 1}
    workers.results()
    assert workers.call(acted) == [policy(torch.ones(4)).tolist()] * 2
    assert workers.call(received, 0.001) == [False, False]
    policy = policy_of(4.0)
    sender.send_async(policy.state_dict())
    report = sender.wait_async()
    assert report is not None and report.version == 2
    assert workers.call(received, TIMEOUT) == [True, True]
    assert workers.call(acted) == [policy(torch.ones(4)).tolist()] * 2
    sender.send(policy_of(5.0).state_dict(), worker_ids=1)
    assert workers.call(received, 0.05) == [False, True]
    scheme.shutdown()


def test_shared_memory_needs_no_receive(workers: WorkerGroup) -> None:
    """The second example of the documentation: workers use updates without a call."""
    scheme = wsync.SharedMemWeightSyncScheme(strategy="tensordict", auto_register=True)
    ours, theirs = pipes_to(workers)
    scheme.init_on_sender(model_id="policy", pipes=ours)
    sender = scheme.get_sender()
    for worker, pipe in zip(workers, theirs, strict=True):
        worker.start(follow, wsync.SharedMemWeightSyncScheme, pipe)  # they connect while it sends
    for value in (1.0, 2.0):
        policy = policy_of(value)
        sender.send(TensorDict.from_module(policy))
        if value == 1.0:
            workers.results()
        assert workers.call(acted) == [policy(torch.ones(4)).tolist()] * 2
    scheme.shutdown()
    for worker in workers:
        assert worker.call(received, TIMEOUT)
        with pytest.raises(multiprocessing.ProcessError, match=r"NotConnected.*has shut down"):
            worker.call(received, TIMEOUT)


@pytest.mark.parametrize("name", ["shared_mem", "multiprocess", "distributed", "rpc", "ray"])
def test_ends_do_not_exist_before_init(name: str) -> None:
    with wsync.WeightSyncScheme.from_backend(name) as scheme:
        with pytest.raises(RuntimeError, match="init_on_sender"):
            scheme.get_sender()
        with pytest.raises(RuntimeError, match="init_on_receiver"):
            scheme.get_receiver()
        assert isinstance(scheme.create_sender(), wsync.WeightSender)
        assert isinstance(scheme.create_receiver(), wsync.WeightReceiver)
        with pytest.raises(RuntimeError, match="init_on_sender"):
            scheme.create_sender().send(policy_of(1.0))
        with pytest.raises(ValueError, match="which worker"):
            scheme.init_on_worker("policy", model=policy_of(1.0))


def test_contexts_with_pipes_and_models() -> None:
    ours, theirs = multiprocessing.Pipe()
    cached = wsync.WeightStrategy().extract_weights(policy_of(1.0))
    model = nn.Linear(4, 2)
    with wsync.SharedMemWeightSyncScheme(auto_register=False) as sender, wsync.SharedMemWeightSyncScheme() as worker:
        sender.init_on_sender("policy", SimpleNamespace(pipes=[ours], cached_weights=cached))
        worker.init_on_worker("policy", SimpleNamespace(pipe=theirs, model=model))
        sender.get_sender().send()
        assert worker.get_receiver().receive(TIMEOUT)
        assert torch.equal(model.weight, policy_of(1.0).weight)
        sender.get_sender().send(policy_of(2.0))
        assert torch.equal(cached["weight"], policy_of(2.0).weight)  # they are the shared buffers


def test_transports_made_from_pipes(make: Make) -> None:
    pairs = [multiprocessing.Pipe() for _ in range(2)]
    models = [nn.Linear(4, 2), nn.Linear(4, 2)]
    with make() as sender, make() as first, make() as second:
        transports = [sender.create_transport(ours) for ours, _ in pairs]
        arriving = [
            threading.Thread(target=worker.init_on_worker, kwargs={"pipe": theirs, "model": model})
            for worker, (_, theirs), model in zip((first, second), pairs, models, strict=True)
        ]
        for thread in arriving:
            thread.start()
        transports[1].send_weights(policy_of(2.0))
        for thread in arriving:
            thread.join(TIMEOUT)
        one_for_all = make is wsync.SharedMemWeightSyncScheme
        assert second.get_receiver().receive(TIMEOUT)
        assert first.get_receiver().receive(0.02) is one_for_all
        assert sender.create_sender().send(policy_of(3.0)) is not None
        assert torch.equal(models[0].weight, policy_of(3.0).weight)
        with pytest.raises(ValueError, match="was not given that pipe"):
            sender.create_transport(pairs[0][1])
        sender.create_transport(SimpleNamespace(worker_idx=0, sentinel=-1)).send_weights(policy_of(4.0))
        assert first.get_receiver().receive(TIMEOUT)


def take(state: WorkerState, scheme: Any, worker: int) -> None:
    state.schemes["policy"], state.models["policy"] = scheme, Small()
    scheme.init_on_worker("policy", SimpleNamespace(policy=state.models["policy"], worker_idx=worker))


@pytest.mark.parametrize("name", ["shared_mem", "distributed"])
def test_without_pipes_the_scheme_is_pickled(name: str, workers: WorkerGroup) -> None:
    with wsync.WeightSyncScheme.from_backend(name) as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 7.0), num_workers=2)
        for index, worker in enumerate(workers):
            worker.call(take, pickle.loads(pickle.dumps(scheme)), index)
        assert workers.call(received, 0.001) == [False, False]
        scheme.get_sender().send()
        workers.call(poll)
        assert [seen[0] for seen in workers.call(commands.output)] == [7.0, 7.0]
