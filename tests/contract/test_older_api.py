"""The older names: senders and receivers, and pipes in place of a pickled scheme and a ``connect``."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import policy_of
from stopping import wait_until_asleep
from tensordict import TensorDict
from torch import nn

import wsync
from wsync.testing import WorkerError, WorkerGroup, commands
from wsync.testing.commands import WorkerState
from wsync.testing.models import Small, fill

Make = Callable[..., Any]


TIMEOUT = 60.0
"""Seconds for what takes milliseconds."""


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
        with pytest.raises(WorkerError, match=r"NotConnected.*has shut down"):
            worker.call(received, TIMEOUT)


def test_a_transport_leads_to_the_worker_of_its_pipe_whenever_it_was_made() -> None:
    pipes = [multiprocessing.Pipe() for _ in range(2)]
    sender, models = wsync.MultiProcessWeightSyncScheme(), [nn.Linear(4, 2) for _ in range(2)]
    early = sender.create_transport(pipes[1][0])
    sender.init_on_sender("policy", pipes=[ours for ours, _ in pipes])
    with sender, ExitStack() as stack:
        for (_, theirs), model in zip(pipes, models, strict=True):
            worker = stack.enter_context(wsync.MultiProcessWeightSyncScheme())
            worker.init_on_worker("policy", pipe=theirs, model=model)
        transports = [sender.create_transport(pipes[0][0]), early]
        for value, transport in enumerate(transports):
            transport.send_weights(policy_of(float(value + 1)))
        assert [model(torch.ones(4)).tolist() for model in models] == [
            policy_of(value)(torch.ones(4)).tolist() for value in (1.0, 2.0)
        ]


def both_ends(make: Make, **options: Any) -> tuple[Any, Any, nn.Module]:
    """A sender's scheme and a worker's, and the worker's model, in one process."""
    ours, theirs = multiprocessing.Pipe()
    sender, worker, model = make(**options), make(**options), nn.Linear(4, 2)
    sender.init_on_sender("policy", pipes=[ours])
    worker.init_on_worker("policy", pipe=theirs, model=model)
    return sender, worker, model


class Slow(nn.Linear):
    """Its forward lasts until ``go`` is set, and returns whether the weights stayed the same meanwhile."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.inside, self.go = threading.Event(), threading.Event()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        before = self.weight.detach().clone()
        self.inside.set()
        assert self.go.wait(TIMEOUT)
        return torch.equal(before, self.weight) * torch.ones(1)


def test_a_forward_that_began_before_the_worker_was_admitted_is_not_torn(make: Make) -> None:
    ours, theirs = multiprocessing.Pipe()
    model, seen = Slow(), []
    with make() as sender, make() as worker:
        sender.init_on_sender("policy", pipes=[ours])
        worker.init_on_worker("policy", pipe=theirs, model=model)
        acting = threading.Thread(target=lambda: seen.append(model(torch.ones(4)).item()))
        acting.start()
        assert model.inside.wait(TIMEOUT)
        sending = threading.Thread(target=sender.get_sender().send, args=(policy_of(1.0),))
        sending.start()
        sending.join(0.2)
        model.go.set()
        acting.join(TIMEOUT)
        sending.join(TIMEOUT)
        assert seen == [1.0]
        assert torch.equal(model.weight, policy_of(1.0).weight)


def test_a_pipe_carries_one_message_and_belongs_to_the_user(make: Make) -> None:
    ours, theirs = multiprocessing.Pipe()
    ours.send("before")
    models = {name: policy_of(0.0) for name in ("actor", "critic")}
    senders = {name: make() for name in models}
    for name, sender in senders.items():
        sender.init_on_sender(name, pipes=[ours])
    ours.send("after")
    assert theirs.recv() == "before"
    with (
        make(timeout=5.0) as wrong,
        pytest.raises(ValueError, match=r"message is about 'actor', this worker about 'critic'"),
    ):
        wrong.init_on_worker("critic", pipe=theirs, model=models["critic"])
    with make() as worker:
        worker.init_on_worker("critic", pipe=theirs, model=models["critic"])
        assert theirs.recv() == "after"
        senders["critic"].get_sender().send(policy_of(2.0))
        assert worker.get_receiver().receive(TIMEOUT) is True
        assert torch.equal(models["critic"].weight, policy_of(2.0).weight)
    ours.send("no invitation")
    with make() as worker, pytest.raises(ValueError, match="not init_on_sender"):
        worker.init_on_worker("policy", pipe=theirs, model=models["actor"])
    ours.close()
    with make() as worker, pytest.raises(wsync.NotConnected, match="closed this pipe"):
        worker.init_on_worker("policy", pipe=theirs, model=models["actor"])
    with make() as closed, pytest.raises(wsync.NotConnected, match="worker 0: its pipe is closed"):
        closed.init_on_sender("policy", pipes=[ours])
    for sender in senders.values():
        sender.shutdown()


def test_a_worker_that_does_not_connect_is_named_and_may_connect_later(make: Make) -> None:
    (ours, theirs), (other, _their_other) = multiprocessing.Pipe(), multiprocessing.Pipe()
    model = nn.Linear(4, 2)
    with make(timeout=0.3) as sender, make() as first, make() as second:
        sender.init_on_sender("policy", pipes=[ours, other])
        first.init_on_worker("policy", pipe=theirs, model=model)
        with pytest.raises(wsync.SyncTimeout, match=r"worker\(s\) 1 did not connect"):
            sender.get_sender().send(policy_of(1.0))
        second.init_on_worker("policy", pipe=_their_other, model=nn.Linear(4, 2))
        sender.get_sender().send(policy_of(2.0))
        assert first.get_receiver().receive(TIMEOUT) and second.get_receiver().receive(TIMEOUT)
        assert torch.equal(model.weight, policy_of(2.0).weight)


def test_a_pipe_without_the_senders_message_is_an_error_at_the_timeout(make: Make) -> None:
    _ours, theirs = multiprocessing.Pipe()
    with make(timeout=0.05) as worker, pytest.raises(wsync.SyncTimeout, match="init_on_sender"):
        worker.init_on_worker("policy", pipe=theirs, model=nn.Linear(4, 2))


@pytest.mark.parametrize("other", [None, 3, "text", [1], ["tokenize"]])
def test_an_attribute_of_a_context_that_is_no_pipes(make: Make, other: Any) -> None:
    with make() as sender:
        sender.init_on_sender("policy", SimpleNamespace(pipes=other, policy=nn.Linear(4, 2)), num_workers=2)
        assert sender.num_workers == 2


def test_a_full_pipe_is_an_error_at_the_timeout(make: Make) -> None:
    ours, _theirs = multiprocessing.Pipe()
    os.set_blocking(ours.fileno(), False)
    with suppress(BlockingIOError):
        while True:
            os.write(ours.fileno(), bytes(4096))
    os.set_blocking(ours.fileno(), True)
    with make(timeout=0.05) as sender:
        with pytest.raises(wsync.SyncTimeout, match="worker 0: its pipe is full"):
            sender.init_on_sender("policy", pipes=[ours])
        with pytest.raises(ValueError, match="num_workers: 2, pipes: 1"):
            sender.init_on_sender("policy", pipes=[ours], num_workers=2)


def test_weights_that_do_not_fit_are_an_error_at_the_sender(make: Make, workers: WorkerGroup) -> None:
    ours, theirs = pipes_to(workers)
    with make() as scheme:
        scheme.init_on_sender("policy", pipes=ours[:1])
        workers[0].call(follow, make, theirs[0], "policy", 5)
        with pytest.raises(wsync.WorkerFailed, match=r"worker 0(.|\n)*LayoutMismatch"):
            scheme.get_sender().send(policy_of(1.0))


@pytest.mark.parametrize("late", [False, True])
def test_the_end_of_the_sender_ends_a_receive(make: Make, late: bool) -> None:
    sender, worker, _ = both_ends(make)
    if late:
        sender.get_sender().send(policy_of(1.0))
        assert worker.get_receiver().receive(TIMEOUT)
    sender.shutdown()
    with pytest.raises(wsync.NotConnected, match="the sender"):
        worker.get_receiver().receive(TIMEOUT)
    worker.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("wsync")]


def test_connect_after_init_on_worker_waits_for_the_connection_that_it_has_begun(make: Make) -> None:
    sender, worker, model = both_ends(make)
    with sender, worker, ThreadPoolExecutor() as pool:
        waiting = threading.Thread(target=worker.connect)
        waiting.start()
        assert waiting.native_id is not None
        wait_until_asleep(waiting.native_id)
        sent = pool.submit(sender.get_sender().send, policy_of(1.0))
        waiting.join()
        assert sent.result(TIMEOUT) is not None
        assert worker.receive(TIMEOUT) is not None
        sender.send(policy_of(2.0))
        assert torch.equal(model.weight, policy_of(2.0).weight)
        with pytest.raises(RuntimeError, match="connected already"):
            worker.connect()


def test_connect_after_init_on_worker_leaves_the_connection_to_it_also_if_it_raises(make: Make) -> None:
    sender, worker, model = both_ends(make)
    with sender, worker:
        worker.timeout = 0.01
        with pytest.raises(
            wsync.SyncTimeout, match=r"did not answer within 0.01 s: does it call connect\(\) or readmit"
        ):
            worker.connect()
        with pytest.raises(ValueError, match="has begun to connect worker 0, not 1"):
            worker.connect(worker_idx=1)
        with wsync.gate(), pytest.raises(RuntimeError, match="outside any forward"):
            worker.connect()
        worker.timeout = TIMEOUT
        sender.get_sender().send(policy_of(1.0))
        worker.connect()
        assert torch.equal(model.weight, policy_of(1.0).weight)


def test_connect_after_the_connection_of_init_on_worker_is_made_returns_once(make: Make) -> None:
    sender, worker, model = both_ends(make)
    with sender, worker:
        sender.get_sender().send(policy_of(1.0))
        worker.connect()
        with pytest.raises(RuntimeError, match="connected already"):
            worker.connect()
        assert torch.equal(model.weight, policy_of(1.0).weight)


def test_a_worker_of_init_on_worker_that_has_lost_its_sender_connects_anew(make: Make) -> None:
    with make() as sender:
        sender.init_on_sender("policy", num_workers=1)
        model = nn.Linear(4, 2)
        with pickle.loads(pickle.dumps(sender)) as worker, ThreadPoolExecutor() as pool:
            worker.init_on_worker("policy", model=model, worker_idx=0)
            sender.get_sender().send(policy_of(1.0))
            sender.disconnect(0)
            with pytest.raises(wsync.NotConnected):
                worker.receive(TIMEOUT)
                worker.receive(TIMEOUT)  # the first call may return version 1
            connecting = pool.submit(worker.connect)
            sender.readmit(0)
            connecting.result(TIMEOUT)
            sender.send(policy_of(2.0))
            assert torch.equal(model.weight, policy_of(2.0).weight)


def test_init_on_worker_may_be_called_again_after_there_was_no_thread_for_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make() as sender:
        sender.init_on_sender("policy", num_workers=1)
        model = nn.Linear(4, 2)
        with pickle.loads(pickle.dumps(sender)) as worker:
            with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start new thread"):
                patch.setattr(threading.Thread, "start", no_thread)
                worker.init_on_worker("policy", model=model, worker_idx=0)
            assert type(model) is nn.Linear
            worker.init_on_worker("policy", model=model, worker_idx=0)
            sender.get_sender().send(policy_of(1.0))
            assert worker.get_receiver().receive(TIMEOUT)
            assert torch.equal(model.weight, policy_of(1.0).weight)


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_worker_may_shut_down_before_it_was_admitted(make: Make) -> None:
    sender, worker, model = both_ends(make, timeout=0.3)
    worker.shutdown()
    assert "wsync-connect" not in [thread.name for thread in threading.enumerate()]
    with sender, pickle.loads(pickle.dumps(sender)) as late:
        with pytest.raises(wsync.SyncTimeout, match=r"worker\(s\) 0 did not connect in time"):
            sender.get_sender().send(policy_of(1.0))
        late.init_on_worker("policy", model=model, worker_idx=0)
        sender.get_sender().send(policy_of(2.0))
        assert late.get_receiver().receive(TIMEOUT)
    assert type(model) is nn.Linear


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


def test_the_scheme_none_accepts_every_call() -> None:
    scheme = wsync.NoWeightSyncScheme()
    scheme.init_on_sender("policy", pipes=[])
    scheme.get_sender().send(policy_of(1.0))
    scheme.init_on_worker("policy", pipe=None, model=policy_of(1.0))
    assert scheme.get_receiver().receive(0.0) is False


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
    """Transports made by `create_transport`: the first send connects."""
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
