"""Workers that fetch (``initiator="receiver"``): which of their threads wait for a version, and what ends the wait."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from scripted import Scripted
from torch import nn
from workers_here import connect, make_worker, model_of

import wsync
from wsync.control import Connection, Kind, Message
from wsync.control.messages import REQUEST_NUMBER
from wsync.control.settings import SenderSettings
from wsync.deadlines import deadline_in, wait_readable
from wsync.gate import process_gate
from wsync.testing import WorkerPool, commands
from wsync.testing.commands import WorkerState
from wsync.testing.models import Small, fill
from wsync.weights.layout import Layout
from wsync.weights.snapshot import snapshot

TIMEOUT = 20.0
SETTINGS = SenderSettings(Layout.of(snapshot(nn.Linear(2, 2))), None).dump()


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("end", ["shutdown", "disconnect"])
def test_the_end_of_a_worker_that_pulls(near: bool, end: str) -> None:
    with wsync.DistributedWeightSyncScheme(timeout=TIMEOUT, initiator="receiver") as sender:
        sender.init_on_sender("policy", weights=model_of(1), num_workers=1)
        with make_worker(sender, 0, near=near) as worker:
            connect(sender.connect, worker)
            assert worker.pull(TIMEOUT) == 1
            if end == "shutdown":
                sender.shutdown()
            else:
                sender.disconnect(0)
            with pytest.raises(wsync.NotConnected, match="died") if end == "disconnect" else nullcontext():
                while not worker.finished:
                    assert worker.pull(TIMEOUT) == 1


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


def outputs(state: WorkerState) -> list[float]:
    return [model().tolist()[0] for model in state.models.values()]


def test_an_update_of_one_model_does_not_wait_for_the_fetch_of_another(pool: WorkerPool) -> None:
    """The thread that installs the update of the second model is the one that would read the answer to the fetch."""
    first = wsync.DistributedWeightSyncScheme(
        shared_memory=False, timeout=TIMEOUT, initiator="receiver", max_staleness=0
    )
    second = wsync.SharedMemWeightSyncScheme(timeout=TIMEOUT / 4)
    models = {"first": fill(Small(), 1), "second": fill(Small(), 1)}
    with pool.group(1) as workers, first, second:
        for scheme, (name, model) in zip((first, second), models.items(), strict=True):
            scheme.init_on_sender(name, model=model, num_workers=1)
            workers[0].start(commands.join, scheme, Small, 0, name)
            scheme.connect()
            workers[0].result()
        fill(models["first"], 2)
        first.send()
        for value in (2, 3):
            fill(models["second"], value)
            second.send()
        assert workers[0].call(outputs) == [2, 3]


class Silent:
    """A sender that names version 9 and answers no request."""

    def __init__(self) -> None:
        self.ends: list[Connection] = []

    def __call__(self, sender: Connection) -> None:
        self.ends.append(sender)
        sender.send(Message(Kind.ACCEPTED, 0, 0, SETTINGS))

    def name_a_version(self) -> None:
        self.ends[-1].send(Message(Kind.NEWEST, 0, 9, REQUEST_NUMBER.pack(0)))

    def await_request(self) -> None:
        while True:
            assert wait_readable([self.ends[-1].fileno()], deadline_in(TIMEOUT))
            message = self.ends[-1].receive()
            assert message is not None
            if message.kind is Kind.REQUEST:
                return


@contextmanager
def connected(script: Silent, **options: Any) -> Iterator[tuple[Scripted, nn.Module]]:
    with Scripted(script, **options) as worker:
        model = nn.Linear(2, 2)
        worker.init_on_receiver("policy", model=model, worker_idx=0)
        worker.connect()
        yield worker, model


def test_a_shutdown_ends_a_pull_in_another_thread() -> None:
    silent, ended = Silent(), list[type[BaseException]]()
    with connected(silent, timeout=None, initiator="receiver") as (worker, _):

        def pull() -> None:
            try:
                worker.pull()
            except wsync.NotConnected as error:
                ended.append(type(error))

        thread = threading.Thread(target=pull, daemon=True)
        thread.start()
        silent.await_request()
        worker.shutdown()
        thread.join(TIMEOUT)
        assert ended == [wsync.NotConnected]


def act(model: nn.Module, ended: threading.Event) -> None:
    while not ended.is_set():
        model(model.weight)


def test_each_thread_that_acts_waits_for_the_version_that_it_needs() -> None:
    silent, requested = Silent(), threading.Event()
    with connected(silent, timeout=None, initiator="receiver", max_staleness=0) as (worker, model):
        silent.name_a_version()
        threads = [threading.Thread(target=act, args=(model, requested), daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
            silent.await_request()
        requested.set()
        worker.shutdown()
        for thread in threads:
            thread.join(TIMEOUT)
        assert not any(thread.is_alive() for thread in threads)


def test_a_receive_ends_at_its_timeout_while_a_version_is_awaited() -> None:
    silent, requested, received = Silent(), threading.Event(), list[Any]()
    with connected(silent, timeout=None, initiator="receiver", max_staleness=0) as (worker, model):
        silent.name_a_version()
        acting = threading.Thread(target=act, args=(model, requested), daemon=True)
        acting.start()
        silent.await_request()
        receiving = threading.Thread(target=lambda: received.append(worker.receive(0.1)), daemon=True)
        receiving.start()
        receiving.join(TIMEOUT)
        in_time = list(received)
        requested.set()
        worker.shutdown()
        acting.join(TIMEOUT)
        assert in_time == [None]


@contextmanager
def too_old() -> Iterator[None]:
    """A model that is too old; the sender does not send the version that it needs."""
    silent = Silent()
    with connected(silent, timeout=0.2, initiator="receiver", max_staleness=0) as (_, model):
        silent.name_a_version()
        with pytest.raises(wsync.SyncTimeout, match="version 9 did not come"):
            while True:  # the version is not known before its message was read
                model(model.weight)
        yield


def test_the_shutdown_of_one_model_does_not_wait_for_the_fetch_of_another() -> None:
    with connected(Silent()) as (other, _), too_old():
        other.shutdown()
        assert len(process_gate().gate_state.hooks) == 1


def test_a_model_connects_without_waiting_for_the_fetch_of_another() -> None:
    with too_old(), connected(Silent()) as (other, _):
        assert other.version == 0 and len(process_gate().gate_state.hooks) == 2


def test_a_worker_that_connects_anew_forgets_the_version_that_its_former_sender_named() -> None:
    silent = Silent()
    with connected(silent, timeout=0.5, initiator="receiver", max_staleness=0) as (worker, model):
        silent.name_a_version()
        with pytest.raises(wsync.SyncTimeout, match="version 9 did not come"):
            while True:
                model(model.weight)
        silent.ends[-1].close()
        with pytest.raises(wsync.NotConnected):
            worker.receive(TIMEOUT)  # until the receiver thread has noticed
        worker.connect()
        assert model(model.weight).shape == (2, 2)


def test_a_forward_waits_for_no_version_of_another_model() -> None:
    """It waits for its own, also if it is called by a model that contains it."""
    silent = Silent()
    with connected(silent, timeout=0.2, initiator="receiver", max_staleness=0) as (_, model):
        silent.name_a_version()
        with wsync.SharedMemWeightSyncScheme() as other, wsync.SharedMemWeightSyncScheme() as outer:
            other.init_in_process("other", Small(), fill(Small(), 1))
            outer.init_in_process("outer", nn.Sequential(model), nn.Sequential(nn.Linear(2, 2)))
            for forward in (model, outer.model):
                with pytest.raises(wsync.SyncTimeout, match="version 9"):
                    while True:  # the version is named when its message has arrived
                        forward(model.weight)
                assert other.model()[0] == 1


def refuse_2_and_3(weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    if any(value in (2, 3) for tensor in weights.values() for value in tensor.flatten().tolist()):
        raise ArithmeticError("2 or 3")
    return weights


def test_a_forward_does_not_use_a_model_that_is_too_old_because_versions_were_refused() -> None:
    options: dict[str, Any] = {"initiator": "receiver", "max_staleness": 1, "receive_transform": refuse_2_and_3}
    with wsync.SharedMemWeightSyncScheme(timeout=TIMEOUT, **options) as sender:
        sender.init_on_sender("policy", model=model_of(1), num_workers=1)
        with make_worker(sender, 0) as worker:
            connect(sender.connect, worker)
            sender.send(model_of(2))
            assert worker.model(torch.ones(2)).item() == 3  # one version behind
            sender.send(model_of(3))
            for _ in range(2):
                with pytest.raises(wsync.WeightSyncError, match=r"version 3 was not installed.* has version 1"):
                    worker.model(torch.ones(2))
            with pytest.raises(wsync.WorkerFailed, match="2 or 3"):
                sender.send(model_of(4))
            sender.send(model_of(5))
            sender.send(model_of(6))
            assert worker.model(torch.ones(2)).item() == 18


def load_all_but_2(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
    if any(2 in tensor for _, tensor in pairs):
        raise ArithmeticError("refused")


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("first", [1, 2])
def test_a_pull_raises_for_the_newest_version_until_a_newer_one_is_installed(near: bool, first: int) -> None:
    """Version 2 is refused; or (``first``) version 1, which the worker gets after it has connected."""
    with wsync.DistributedWeightSyncScheme(timeout=TIMEOUT, initiator="receiver") as sender:
        sender.init_on_sender("policy", weights=model_of(1) if first == 2 else None, num_workers=1)
        with make_worker(sender, 0, near=near, load=load_all_but_2) as worker:
            connect(sender.connect, worker)
            sender.send(model_of(2))
            for timeout in (TIMEOUT, None):
                with pytest.raises(
                    wsync.WeightSyncError, match=rf"worker 0: version {first} could(?s:.)*ArithmeticError"
                ):
                    worker.pull(timeout)
                assert worker.version == first - 1
            with pytest.raises(wsync.WorkerFailed, match="refused"):
                sender.send(model_of(3))
            assert worker.pull(TIMEOUT) == first + 1
            assert worker.pull(TIMEOUT) == first + 1


@pytest.mark.parametrize("near", [True, False])
def test_a_pull_raises_for_a_version_that_was_refused_on_arrival(near: bool) -> None:
    with wsync.DistributedWeightSyncScheme(timeout=TIMEOUT) as sender:
        sender.init_on_sender("policy", num_workers=1)
        with make_worker(sender, 0, near=near, load=load_all_but_2) as worker:
            connect(sender.connect, worker)
            with pytest.raises(wsync.SyncTimeout, match="no version yet"):
                worker.pull(0.0)
            with pytest.raises(wsync.WorkerFailed, match="refused"):
                sender.send(model_of(2))
            with pytest.raises(wsync.WeightSyncError, match=r"version 1 could(?s:.)*version: none(?s:.)*refused"):
                worker.pull(TIMEOUT)
            sender.send(model_of(3))
            assert worker.pull(0.0) == 2
