"""The older names: senders and receivers, and pipes in place of a pickled scheme and a ``connect``."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract_models import Small, fill
from crew import PATIENCE, Crew, RemoteError
from tensordict import TensorDict
from torch import nn

import wsync

Make = Callable[..., Any]
PIPED = [wsync.MultiProcessWeightSyncScheme, wsync.SharedMemWeightSyncScheme]


@pytest.fixture(scope="module")
def shared_crew() -> Iterator[Crew]:
    workers = Crew(2, kind="process")
    yield workers
    workers.close()


@pytest.fixture
def workers(shared_crew: Crew) -> Iterator[Crew]:
    yield shared_crew
    assert shared_crew.all("shutdown") == [[], []]
    shared_crew.all("run", forget)


@pytest.fixture(params=PIPED)
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


def forget(host: Any) -> None:
    host.schemes.clear()
    host.models.clear()


def pipes_to(workers: Crew) -> tuple[list[Any], list[Any]]:
    pairs = [multiprocessing.Pipe() for _ in workers.workers]
    return [ours for ours, _ in pairs], [theirs for _, theirs in pairs]


def follow(host: Any, make: Make, pipe: Any, model_id: str = "policy", width: int = 4) -> int | None:
    """As the documents have it: a scheme of the worker's own, and the pipe."""
    host.models[model_id] = nn.Linear(width, 2)
    host.schemes[model_id] = scheme = make()
    scheme.init_on_worker(model_id=model_id, pipe=pipe, model=host.models[model_id])
    return scheme.worker_idx


def poll(host: Any, model_id: str = "policy") -> int:
    """Look again and again whether there are new weights, as an acting worker does; how often there were none."""
    receiver, empty = host.schemes[model_id].get_receiver(), 0
    until = time.monotonic() + PATIENCE
    while not receiver.receive(timeout=0.001):
        assert time.monotonic() < until
        empty += 1
    return empty


def received(host: Any, timeout: float | None) -> bool:
    return host.schemes["policy"].get_receiver().receive(timeout)


def acted(host: Any, model_id: str = "policy") -> list[float]:
    with torch.no_grad():
        return host.models[model_id](torch.ones(4)).tolist()


def policy_of(value: float) -> Any:
    return fill(nn.Linear(4, 2), value)


def test_state_dicts_through_pipes(workers: Crew) -> None:
    """The documents' first example."""
    scheme = wsync.MultiProcessWeightSyncScheme(strategy="state_dict")
    ours, theirs = pipes_to(workers)
    scheme.init_on_sender(model_id="policy", pipes=ours)
    for worker, pipe in zip(workers.workers, theirs, strict=True):
        worker.start("run", follow, wsync.MultiProcessWeightSyncScheme, pipe)
    assert workers.results() == [0, 1]
    assert workers.all("run", received, 0.001) == [False, False]  # nobody has sent, and nobody waits for that
    for worker in workers.workers:
        worker.start("run", poll)
    sender, policy = scheme.get_sender(), policy_of(3.0)
    report = sender.send(policy.state_dict())
    assert report is not None and dict(report.workers) == {0: 1, 1: 1}
    workers.results()
    assert workers.all("run", acted) == [policy(torch.ones(4)).tolist()] * 2
    assert workers.all("run", received, 0.001) == [False, False]
    policy = policy_of(4.0)
    sender.send_async(policy.state_dict())
    sender.wait_async()
    assert workers.all("run", received, PATIENCE) == [True, True]
    assert workers.all("run", acted) == [policy(torch.ones(4)).tolist()] * 2
    sender.send(policy_of(5.0).state_dict(), worker_ids=1)
    assert workers.all("run", received, 0.05) == [False, True]
    scheme.shutdown()


def test_shared_memory_needs_no_receive(workers: Crew) -> None:
    """The documents' second example: workers see updates whether they look or not."""
    scheme = wsync.SharedMemWeightSyncScheme(strategy="tensordict", auto_register=True)
    ours, theirs = pipes_to(workers)
    scheme.init_on_sender(model_id="policy", pipes=ours)
    sender = scheme.get_sender()
    for worker, pipe in zip(workers.workers, theirs, strict=True):
        worker.start("run", follow, wsync.SharedMemWeightSyncScheme, pipe)  # they come while it sends
    for value in (1.0, 2.0):
        policy = policy_of(value)
        sender.send(TensorDict.from_module(policy))
        if value == 1.0:
            workers.results()
        assert workers.all("run", acted) == [policy(torch.ones(4)).tolist()] * 2
    scheme.shutdown()
    for worker in workers.workers:
        assert worker.call("run", received, PATIENCE)
        with pytest.raises(RemoteError, match=r"NotConnected.*has shut down"):
            worker.call("run", received, PATIENCE)


def both_ends(make: Make, **options: Any) -> tuple[Any, Any, nn.Module]:
    """In one process, which the thread allows: a sender's scheme and a worker's."""
    ours, theirs = multiprocessing.Pipe()
    sender, worker, model = make(**options), make(**options), nn.Linear(4, 2)
    sender.init_on_sender("policy", pipes=[ours])
    worker.init_on_worker("policy", pipe=theirs, model=model)
    return sender, worker, model


class Slow(nn.Linear):
    """Its forward lasts until it is told to end, and says whether the weights stayed the same meanwhile."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.inside, self.go = threading.Event(), threading.Event()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        before = self.weight.detach().clone()
        self.inside.set()
        assert self.go.wait(PATIENCE)
        return torch.equal(before, self.weight) * torch.ones(1)


def test_a_forward_that_began_before_it_was_let_in_is_not_torn(make: Make) -> None:
    ours, theirs = multiprocessing.Pipe()
    model, seen = Slow(), []
    with make() as sender, make() as worker:
        sender.init_on_sender("policy", pipes=[ours])
        worker.init_on_worker("policy", pipe=theirs, model=model)
        acting = threading.Thread(target=lambda: seen.append(model(torch.ones(4)).item()))
        acting.start()
        assert model.inside.wait(PATIENCE)
        sending = threading.Thread(target=sender.get_sender().send, args=(policy_of(1.0),))
        sending.start()
        sending.join(0.2)
        model.go.set()
        acting.join(PATIENCE)
        sending.join(PATIENCE)
        assert seen == [1.0]
        assert torch.equal(model.weight, policy_of(1.0).weight)


def test_a_pipe_is_the_users_but_for_one_message(make: Make) -> None:
    ours, theirs = multiprocessing.Pipe()
    ours.send("before")
    models = {name: policy_of(0.0) for name in ("actor", "critic")}
    senders = {name: make() for name in models}
    for name, sender in senders.items():
        sender.init_on_sender(name, pipes=[ours])
    ours.send("after")
    assert theirs.recv() == "before"
    with make(timeout=5.0) as wrong, pytest.raises(ValueError, match=r"speaks of 'actor' here.*of 'critic'"):
        wrong.init_on_worker("critic", pipe=theirs, model=models["critic"])
    with make() as worker:
        worker.init_on_worker("critic", pipe=theirs, model=models["critic"])
        assert theirs.recv() == "after"
        senders["critic"].get_sender().send(policy_of(2.0))
        assert worker.get_receiver().receive(PATIENCE) is True
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


def test_who_does_not_come_is_named_and_may_come_later(make: Make) -> None:
    (ours, theirs), (other, _their_other) = multiprocessing.Pipe(), multiprocessing.Pipe()
    model = nn.Linear(4, 2)
    with make(timeout=0.3) as sender, make() as first, make() as second:
        sender.init_on_sender("policy", pipes=[ours, other])
        first.init_on_worker("policy", pipe=theirs, model=model)
        with pytest.raises(wsync.SyncTimeout, match=r"worker\(s\) 1 did not connect"):
            sender.get_sender().send(policy_of(1.0))
        second.init_on_worker("policy", pipe=_their_other, model=nn.Linear(4, 2))
        sender.get_sender().send(policy_of(2.0))
        assert first.get_receiver().receive(PATIENCE) and second.get_receiver().receive(PATIENCE)
        assert torch.equal(model.weight, policy_of(2.0).weight)


def test_no_invitation_is_an_error_in_time(make: Make) -> None:
    _ours, theirs = multiprocessing.Pipe()
    with make(timeout=0.05) as worker, pytest.raises(wsync.SyncTimeout, match="init_on_sender"):
        worker.init_on_worker("policy", pipe=theirs, model=nn.Linear(4, 2))


def test_a_full_pipe_is_an_error_in_time(make: Make) -> None:
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


def test_weights_that_do_not_fit_are_told_at_both_ends(make: Make, workers: Crew) -> None:
    ours, theirs = pipes_to(workers)
    with make() as scheme:
        scheme.init_on_sender("policy", pipes=ours[:1])
        workers[0].call("run", follow, make, theirs[0], "policy", 5)
        with pytest.raises(wsync.WorkerFailed, match=r"worker 0(.|\n)*LayoutMismatch"):
            scheme.get_sender().send(policy_of(1.0))


@pytest.mark.parametrize("late", [False, True])
def test_the_end_of_the_sender_is_heard(make: Make, late: bool) -> None:
    sender, worker, _ = both_ends(make)
    if late:
        sender.get_sender().send(policy_of(1.0))
        assert worker.get_receiver().receive(PATIENCE)
    sender.shutdown()
    with pytest.raises(wsync.NotConnected, match="the sender"):
        worker.get_receiver().receive(PATIENCE)
    worker.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("wsync")]


def test_a_worker_may_leave_before_it_was_let_in(make: Make) -> None:
    sender, worker, model = both_ends(make, timeout=0.3)
    worker.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("wsync")]
    with sender, pickle.loads(pickle.dumps(sender)) as late:
        with pytest.raises(wsync.SyncTimeout, match=r"worker\(s\) 0 did not connect in time"):
            sender.get_sender().send(policy_of(1.0))
        late.init_on_worker("policy", model=model, worker_idx=0)
        sender.get_sender().send(policy_of(2.0))
        assert late.get_receiver().receive(PATIENCE)
    assert type(model) is nn.Linear


@pytest.mark.parametrize("name", ["shared_mem", "multiprocess", "distributed", "rpc", "ray"])
def test_before_init_there_is_nothing_to_get(name: str) -> None:
    with wsync.WeightSyncScheme.from_backend(name) as scheme:
        with pytest.raises(RuntimeError, match="init_on_sender"):
            scheme.get_sender()
        with pytest.raises(RuntimeError, match="not initialised"):
            scheme.get_receiver()
        assert isinstance(scheme.create_sender(), wsync.WeightSender)
        assert isinstance(scheme.create_receiver(), wsync.WeightReceiver)
        with pytest.raises(RuntimeError, match="init_on_sender"):
            scheme.create_sender().send(policy_of(1.0))
        with pytest.raises(ValueError, match="which worker"):
            scheme.init_on_worker("policy", model=policy_of(1.0))


def test_none_takes_it_all() -> None:
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
        assert worker.get_receiver().receive(PATIENCE)
        assert torch.equal(model.weight, policy_of(1.0).weight)
        sender.get_sender().send(policy_of(2.0))
        assert torch.equal(cached["weight"], policy_of(2.0).weight)  # they are the shared buffers


def test_transports_of_pipes(make: Make) -> None:
    """Nothing but the transports, as `create_transport` is documented: the first send does it all."""
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
            thread.join(PATIENCE)
        one_for_all = make is wsync.SharedMemWeightSyncScheme
        assert second.get_receiver().receive(PATIENCE)
        assert first.get_receiver().receive(0.02) is one_for_all
        assert sender.create_sender().send(policy_of(3.0)) is not None
        assert torch.equal(models[0].weight, policy_of(3.0).weight)
        with pytest.raises(ValueError, match="was not given that pipe"):
            sender.create_transport(pairs[0][1])
        sender.create_transport(SimpleNamespace(worker_idx=0, sentinel=-1)).send_weights(policy_of(4.0))
        assert first.get_receiver().receive(PATIENCE)


def take(host: Any, scheme: Any, worker: int) -> None:
    host.schemes["policy"], host.models["policy"] = scheme, Small()
    scheme.init_on_worker("policy", SimpleNamespace(policy=host.models["policy"], worker_idx=worker))


@pytest.mark.parametrize("name", ["shared_mem", "distributed"])
def test_without_pipes_the_scheme_is_handed_over(name: str, workers: Crew) -> None:
    with wsync.WeightSyncScheme.from_backend(name) as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 7.0), num_workers=2)
        for index, worker in enumerate(workers.workers):
            worker.call("run", take, pickle.loads(pickle.dumps(scheme)), index)
        assert workers.all("run", received, 0.001) == [False, False]
        scheme.get_sender().send()
        workers.all("run", poll)
        assert [seen[0] for seen in workers.all("forward")] == [7.0, 7.0]
