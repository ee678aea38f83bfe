"""The compiled fast path and the slow one, in turn and mixed: whatever is sent, and however, arrives bit for bit."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from backends import BACKENDS, WORKERS
from contract_models import Plain, Small, digest, fill, scramble
from crew import Crew, Host, crew
from striking import struck_at
from tensordict import TensorDict
from torch import nn

import wsync
from wsync import native

LOCAL = ("shared_mem", "shared_mem-published", "multiprocess")


@pytest.fixture(autouse=True)
def workers_of_its_kind(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crew.current_kind", WORKERS.get(backend, "process"))


def go_long(_: Host) -> None:
    """A worker without compiled code."""
    native._native = None


def renew(host: Host) -> None:
    """The worker's model is not as it was: other objects in the same places, and in another one."""
    model: Any = host.models["policy"]
    with wsync.gate():
        model.norm.running_mean = torch.zeros(4)
        model.scalar = nn.Parameter(torch.tensor(0.0))
        model.conv.weight.data = model.conv.weight.data.clone()


def learn(host: Host) -> None:
    """As a BatchNorm in train mode does."""
    model: Any = host.models["policy"]
    with wsync.gate():
        model.norm.running_mean.add_(1.0)


class Story:
    """What the workers ought to have, and how to send it."""

    def __init__(self, scheme: wsync.WeightSyncScheme, workers: Crew, model: Any, seed: int) -> None:
        self.scheme, self.workers, self.model = scheme, workers, model
        self.seed = seed
        self.expected = [digest(model)] * len(workers)

    def changed(self, model: Any) -> Any:
        self.seed += 1
        return scramble(model, self.seed)

    def usual(self) -> None:
        self.changed(self.model)
        self.scheme.send()
        self.expected = [digest(self.model)] * len(self.workers)

    def another_module(self) -> None:
        other = self.changed(Plain())
        for _ in range(2):
            self.scheme.send(other)
            self.expected = [digest(other)] * len(self.workers)
            self.changed(other)

    def tensordict(self) -> None:
        for _ in range(2):
            self.changed(self.model)
            self.scheme.send(TensorDict.from_module(self.model).data)
        self.expected = [digest(self.model)] * len(self.workers)

    def state_dict(self) -> None:
        for _ in range(2):
            self.changed(self.model)
            self.scheme.send(self.model.state_dict())
        self.expected = [digest(self.model)] * len(self.workers)

    def one_worker(self) -> None:
        self.changed(self.model)
        self.scheme.send(worker_ids=1)
        self.expected[1] = digest(self.model)

    def moved(self) -> None:
        self.model.conv.weight.data = self.model.conv.weight.data.clone(memory_format=torch.preserve_format)
        self.model.scalar = nn.Parameter(torch.tensor(2.5))
        self.usual()

    def untied(self) -> None:
        self.model.decode.weight = nn.Parameter(self.model.embed.weight.detach().clone())
        self.scheme.send()
        with pytest.raises(wsync.LayoutMismatch, match="one tied tensor"):
            with torch.no_grad():
                self.model.decode.weight.add_(1.0)
            self.scheme.send()
        self.model.decode.weight = self.model.embed.weight
        self.usual()

    def wrong(self) -> None:
        self.model.brief.data = torch.zeros(3, 5, dtype=torch.bfloat16)
        with pytest.raises(wsync.LayoutMismatch, match="brief"):
            self.scheme.send()
        self.model.brief.data = torch.zeros(5, 3, dtype=torch.bfloat16)

    def asynchronous(self) -> None:
        self.changed(self.model)
        self.scheme.send_async()
        self.changed(self.model)
        self.scheme.send_async()
        self.scheme.wait_async()
        self.expected = [digest(self.model)] * len(self.workers)

    def together(self) -> None:
        self.changed(self.model)
        wsync.synchronize({self.scheme: self.model})
        self.expected = [digest(self.model)] * len(self.workers)

    def other_objects_there(self) -> None:
        self.workers.all("run", renew)
        self.usual()

    def learned_there(self) -> None:
        self.workers.all("run", learn)
        self.usual()

    def forward(self) -> None:
        expected = [one["scalar"] for one in self.expected]
        self.workers.all("forward")
        assert [one["scalar"] for one in self.workers.all("raw_digest")] == expected


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("backend", "here", "there"),
    [(backend, here, there) for backend in LOCAL for here in (True, False) for there in (True, False)]
    + [("distributed", True, True), ("distributed", False, True), ("distributed", True, False), ("rpc", True, True)]
    + [("distributed-gloo", True, True)],
)
def test_whatever_is_sent_arrives(backend: str, here: bool, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not here:
        monkeypatch.setattr(native, "_native", None)
    elif not native.available:
        pytest.skip("the compiled fast path was not built here")
    chance = random.Random(f"{backend} {here} {there}")
    names = [name for name in vars(Story) if not name.startswith("_") and name != "changed"]
    with crew(2) as workers, BACKENDS[backend]() as scheme:
        if not there:
            workers.all("run", go_long)
        story = Story(scheme, workers, scramble(Plain(), 0), seed=0)
        scheme.init_on_sender("policy", model=story.model, num_workers=2)
        workers.follow(scheme, Plain)
        for name in (*names, *chance.choices(names, k=25)):
            getattr(story, name)()
            version = scheme.version
            if chance.random() < 0.7:  # else updates pile up
                assert workers.all("digest") == story.expected, name
                assert scheme.version == version


@pytest.mark.timeout(60)
@pytest.mark.parametrize("backend", [*LOCAL, "distributed"])
def test_what_was_sent_is_not_kept_alive(backend: str) -> None:
    model, sent = scramble(Plain(), 0), []
    with crew(1) as workers, BACKENDS[backend]() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=1)
        workers.follow(scheme, Plain)
        for _ in range(6):
            copy = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            sent += [weakref.ref(tensor) for tensor in copy.values()]
            scheme.send(copy)
        del copy
        gc.collect()
        assert not any(reference() is not None for reference in sent)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("backend", [*LOCAL, "distributed", "rpc"])
def test_usual_updates_take_the_fast_path(backend: str) -> None:
    if not native.available:
        pytest.skip("the compiled fast path was not built here")
    model = scramble(Plain(), 0)
    with crew(2) as workers, BACKENDS[backend]() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers.follow(scheme, Plain)
        sender: Any = scheme._role.sender  # type: ignore[union-attr]

        def went_short() -> bool:
            before = sender._path
            scheme.send()
            return before is not None and sender._path is before

        assert [went_short() for _ in range(3)][1:] == [True, True], "once there are slots enough"
        workers.all("digest")
        assert workers.all("run", armed) == [True, True]
        scheme.send(worker_ids=0)
        assert [went_short(), went_short()] == [False, True]
        scheme.send_async()
        scheme.wait_async()
        assert [went_short(), went_short()] == [False, True]
        workers[1].kill()
        with pytest.raises(wsync.WorkerDied):
            scheme.send()
        assert [went_short(), went_short()] == [False, False], "somebody is missing"
        assert workers[0].call("digest") == digest(model)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("backend", LOCAL)
def test_however_many_workers_there_are_usual_updates_take_the_fast_path(backend: str) -> None:
    if not native.available:
        pytest.skip("the compiled fast path was not built here")
    model, count = fill(Small(), 1), 130
    with crew(2) as hosts, BACKENDS[backend]() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=count)
        for index in range(count):
            hosts[index % 2].start("join", scheme, Small, index, f"policy {index}")
        scheme.connect()
        for index in range(count):
            hosts[index % 2].result()
        sender: Any = scheme.sender
        scheme.send()  # there are slots enough
        before = sender._path
        for value in range(2, 5):
            report = scheme.send(fill(model, value))
            assert report is not None and len(report.workers) == count
        assert before is not None and sender._path is before
        for index in range(count):
            assert hosts[index % 2].call("forward", f"policy {index}")[0] == 4.0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("backend", ["shared_mem", "multiprocess", "distributed", "distributed-gloo"])
def test_what_an_interrupted_update_is_answered_is_no_answer_to_the_next(backend: str) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    model = scramble(Plain(), 0)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with crew(2) as workers, BACKENDS[backend]() as scheme:
            scheme.init_on_sender("policy", model=model, num_workers=2)
            workers.follow(scheme, Plain)
            for round_ in range(3):
                workers[1].stop()
                timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
                timer.start()
                with pytest.raises(Interrupted):
                    scheme.send(scramble(model, 2 * round_ + 1))
                timer.join()
                workers[1].resume()
                scheme.send(scramble(model, 2 * round_ + 2))
                assert scheme.version == 2 * round_ + 3
                assert workers.all("raw_digest") == [digest(model)] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # struck as a generator was closed
@pytest.mark.parametrize("worker_ids", [None, [0, 1]], ids=["short", "long"])
@pytest.mark.parametrize("backend", ["shared_mem", "multiprocess", "distributed", "distributed-gloo"])
def test_wherever_an_update_is_interrupted_the_next_one_arrives(backend: str, worker_ids: list[int] | None) -> None:
    model = scramble(Plain(), 0)
    with crew(2) as workers, BACKENDS[backend](timeout=10.0) as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers.follow(scheme, Plain)
        for point in count(1):
            scheme.send()
            finished = struck_at(point, partial(scheme.send, scramble(model, 2 * point), worker_ids))
            scheme.send(scramble(model, 2 * point + 1))
            assert workers.all("raw_digest") == [digest(model)] * 2
            if finished:
                break


@pytest.mark.timeout(60)
@pytest.mark.parametrize("backend", ["shared_mem", "multiprocess", "distributed"])
def test_a_worker_that_is_silent_costs_one_timeout(backend: str) -> None:
    model = scramble(Plain(), 0)
    with crew(2) as workers, BACKENDS[backend](timeout=20.0) as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers.follow(scheme, Plain)
        scheme.send()
        workers[1].stop()
        scheme.timeout = 2.0
        began = time.monotonic()
        with pytest.raises(wsync.SyncTimeout, match=r"worker 1: did not answer within 2.0 s"):
            scheme.send()
        assert 2.0 <= time.monotonic() - began < 3.9
        workers[1].resume()
        scheme.send(scramble(model, 1))
        assert workers.all("raw_digest") == [digest(model)] * 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("backend", ["shared_mem", "multiprocess", "distributed"])
def test_who_waits_for_another_thread_has_all_its_time_left(backend: str) -> None:
    model = scramble(Plain(), 0)
    with crew(1) as workers, BACKENDS[backend](timeout=20.0) as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=1)
        workers.follow(scheme, Plain)
        scheme.send()
        sender: Any = scheme.sender
        before, sender.timeout = sender._path, 2.0
        with ThreadPoolExecutor(1) as others:
            with sender._lock:  # another thread's update, which takes longer than this one may
                waiting = others.submit(scheme.send, scramble(model, 1))
                threading.Event().wait(2.5)
            report = waiting.result()
        assert (before is not None) == native.available and sender._path is before
        assert report is not None and report.seconds < 2.0
        assert workers.all("raw_digest") == [digest(model)]


def armed(host: Host) -> bool:
    role: Any = host.schemes["policy"]._role
    return role.receiver._end._armed is not None
