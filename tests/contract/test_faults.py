"""What goes wrong is named, in time, on the end that can do something about it; everybody else goes on."""

from __future__ import annotations

import os
import pickle
import queue
import threading
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract_models import Apart, Frozen, Hard, Joined, Small, Tail, digest, fill
from crew import (
    CascadingHost,
    Host,
    RemoteError,
    become_middle,
    below_forward,
    break_cascade,
    close_below,
    crew,
    establish,
    kind,
)
from tensordict import TensorDict

import wsync
from wsync.receiving import staged


@pytest.mark.above_the_ends  # tests/chaos kills actors in the same way
def test_dead_worker(make_scheme: Any) -> None:
    model = fill(Small(), 1)
    with crew(3) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=3)
        workers.follow(scheme, Small)
        workers[1].kill()
        before = time.monotonic()
        with pytest.raises(wsync.WorkerDied, match=r"worker 1: (?!it ).* died") as died:
            scheme.send(fill(model, 2))
        assert time.monotonic() - before < 1.0
        assert set(died.value.workers) == {1}
        assert workers[0].call("forward")[0] == workers[2].call("forward")[0] == 2
        for value in range(3, 8):
            report = scheme.send(fill(model, value))
            assert set(report.workers) == {0, 2}
            assert workers[0].call("forward")[0] == workers[2].call("forward")[0] == value
        with pytest.raises(wsync.WorkerDied, match="1"):
            scheme.send(worker_ids=1)
        workers[0].kill()
        workers[2].kill()
        with pytest.raises(wsync.WorkerDied):
            scheme.send()
        with pytest.raises(wsync.NotConnected, match="nobody"):
            scheme.send()


@pytest.mark.above_the_ends
def test_death_wakes_a_send_that_waits(make_scheme: Any) -> None:
    model = fill(Small(), 1)
    with crew(2) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers.follow(scheme, Small)
        workers[1].stop()
        scheme.send_async(fill(model, 2))  # asked for an answer, which will not come
        threading.Timer(0.2, workers[1].kill).start()
        before = time.monotonic()
        with pytest.raises(wsync.WorkerDied, match="worker 1"):
            scheme.wait_async()
        assert time.monotonic() - before < 2.0
        assert workers[0].call("forward")[0] == 2


@pytest.mark.above_the_ends
def test_stopped_worker(make_scheme: Any) -> None:
    model = fill(Small(), 1)
    with crew(2) as workers, make_scheme(timeout=2.0) as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers.follow(scheme, Small)
        workers[1].stop()
        try:
            before = time.monotonic()
            with pytest.raises(wsync.SyncTimeout, match="worker 1") as late:
                scheme.send_async(fill(model, 2))
                scheme.wait_async()
            assert 1.5 < time.monotonic() - before < 6.0
            assert set(late.value.workers) == {1}
            assert workers[0].call("forward")[0] == 2
        finally:
            workers[1].resume()
        assert workers[1].call("receive", 20.0) is not None  # late, but it comes
        assert workers[1].call("forward")[0] == 2
        scheme.send(fill(model, 3))
        assert [seen[0] for seen in workers.all("forward")] == [3, 3]


@pytest.mark.above_the_ends
def test_apply_that_raises(make_scheme: Any) -> None:
    good = fill(Tail(), 1)
    with crew(2) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=good, num_workers=2)
        workers.follow(scheme, Tail)
        before = workers.all("digest")
        bad = fill(Tail(), 2)
        bad.note = "refuse 1"
        with pytest.raises(wsync.WorkerFailed, match=r"(?s)worker 1.*set_extra_state.*ArithmeticError") as failed:
            scheme.send(bad)
        assert set(failed.value.workers) == {1} and failed.value.version == 2
        assert workers[1].call("digest") == before[1]
        assert workers[0].call("forward")[0] == 2
        assert workers.all("version") == [2, 1]
        for _ in range(6):  # the one who refused goes on, on a slot that was kept for it
            with pytest.raises(wsync.WorkerFailed):
                scheme.send(bad)
            assert workers[1].call("digest") == before[1]
        for value in range(3, 9):
            scheme.send(fill(good, value))
            assert [seen[0] for seen in workers.all("forward")] == [value, value]


def test_first_weights_that_are_refused(make_scheme: Any) -> None:
    bad = fill(Tail(), 2)
    bad.note = "refuse"
    with crew(1) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=bad, num_workers=1)
        workers[0].start("join", scheme, Tail, 0, "policy")
        with pytest.raises(wsync.WorkerFailed, match="ArithmeticError"):
            establish(scheme)
        if scheme.delivers_at_connect:
            with pytest.raises(RemoteError, match="ArithmeticError"):
                workers[0].result()


@pytest.mark.above_the_ends
@pytest.mark.parametrize("backend", ["shared_mem", "multiprocess", "distributed"])
def test_whatever_keeps_a_model_from_following_is_told_to_the_trainer(backend: str) -> None:
    with crew(1) as workers, wsync.WeightSyncScheme.from_backend(backend, timeout=10.0) as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=1)
        workers[0].start("join", scheme, Frozen, 0, "policy")
        with pytest.raises(wsync.WorkerFailed, match="__class__ is frozen"):
            establish(scheme)
        with pytest.raises(RemoteError, match="ArithmeticError"):
            workers[0].result()


@pytest.mark.above_the_ends
def test_index_out_of_range_or_taken(make_scheme: Any) -> None:
    with crew(3) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=Small(), num_workers=2)
        workers[2].start("join", scheme, Small, 5, "policy")
        workers[0].start("join", scheme, Small, 0, "policy")
        connecting = threading.Thread(target=scheme.connect)
        connecting.start()
        with pytest.raises(RemoteError, match=r"worker_idx 5 is out of range.*2 workers"):
            workers[2].result()
        workers[0].result()
        workers[2].start("join", scheme, Small, 0, "another id")
        with pytest.raises(RemoteError, match=r"worker_idx 0 is taken"):
            workers[2].result()
        workers[1].start("join", scheme, Small, 1, "policy")
        workers[1].result()
        connecting.join(20)
        assert not connecting.is_alive()


def try_to_connect(host: Host, timeout: float) -> None:
    """Knock, and have no patience."""
    scheme = host.schemes["policy"]
    with pytest.raises(wsync.SyncTimeout):
        scheme.receiver.connect(0, timeout)


@pytest.mark.above_the_ends
def test_a_worker_that_gave_up_and_comes_again(make_scheme: Any) -> None:
    with crew(1) as workers, crew(1) as spare, make_scheme(timeout=10.0) as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=1)
        workers[0].call("init", scheme, Small, 0, "policy")
        workers[0].call("run", try_to_connect, 0.2)
        spare[0].call("init", scheme, Small, 0, "policy")
        spare[0].call("run", try_to_connect, 0.2)
        spare[0].kill()
        workers[0].start("connect")
        establish(scheme)
        workers[0].result()
        assert workers[0].call("forward")[0] == 1


def test_a_second_connect_of_a_worker_is_refused_at_once_and_breaks_nothing(make_scheme: Any) -> None:
    with crew(1) as workers, make_scheme(timeout=10.0) as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=1)
        workers.follow(scheme, Small)
        for worker_idx in (0, 1):
            with pytest.raises(RemoteError, match=r"worker 0.*is connected already"):
                workers[0].call("run", connect_as, worker_idx)
        scheme.send(fill(Small(), 2))
        assert workers[0].call("forward")[0] == 2
        assert workers[0].call("run", index_of) == 0


def connect_as(host: Host, worker_idx: int) -> None:
    host.schemes["policy"].connect(worker_idx=worker_idx)


def index_of(host: Host) -> int | None:
    return host.schemes["policy"].worker_idx


@pytest.mark.above_the_ends
def test_who_has_knocked_and_left_is_not_waited_for(make_scheme: Any) -> None:
    with crew(1) as gone, crew(1) as workers, make_scheme(timeout=10.0) as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=1)
        gone[0].call("run", knock_and_leave, scheme)
        assert workers.follow(scheme, Small) == [1]


def knock_and_leave(host: Host, scheme: wsync.WeightSyncScheme) -> None:
    scheme.init_on_worker("policy", model=Small(), worker_idx=0)
    scheme.shutdown()


def test_missing_worker(make_scheme: Any) -> None:
    with crew(1) as workers, make_scheme(timeout=1.0) as scheme:
        scheme.init_on_sender("policy", model=Small(), num_workers=2)
        workers[0].start("join", scheme, Small, 0, "policy")
        with pytest.raises(wsync.SyncTimeout, match=r"worker\(s\) 1 did not connect") as late:
            scheme.connect()
        assert set(late.value.workers) == {1}


def test_worker_that_gave_up_and_comes_again(make_scheme: Any) -> None:
    if kind() == "ray":
        pytest.skip("the trainer has the actors join")
    with crew(2) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=2)
        hasty = pickle.loads(pickle.dumps(scheme))
        hasty.timeout = 0.2
        with pytest.raises(RemoteError, match="sender did not answer"):
            workers[0].call("join", hasty, Small, 0, "policy")
        with pytest.raises(RemoteError, match="sender did not answer"):
            workers[1].call("join", hasty, Small, 1, "policy")
        assert workers.follow(scheme, Small) == [1, 1]
        scheme.send(fill(Small(), 2))
        assert [seen[0] for seen in workers.all("forward")] == [2, 2]


@pytest.mark.above_the_ends
def test_worker_that_dies_before_it_connects(make_scheme: Any) -> None:
    with crew(2) as workers, make_scheme() as scheme:
        remote = [SimpleNamespace(worker_idx=i, sentinel=workers[i].process.sentinel) for i in range(2)]
        scheme.init_on_sender("policy", SimpleNamespace(policy=Small(), remote_workers=remote))
        workers[0].start("join", scheme, Small, 0, "policy")
        workers[1].kill()
        before = time.monotonic()
        with pytest.raises(wsync.WorkerDied, match="1") as died:
            scheme.connect()
        assert set(died.value.workers) == {1} and time.monotonic() - before < 5.0


def test_sender_that_leaves(make_scheme: Any) -> None:
    with crew(1) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 3), num_workers=1)
        workers.follow(scheme, Small)
        workers[0].start("receive", None)
        scheme.shutdown()
        with pytest.raises(RemoteError, match="shut down, or died"):
            workers[0].result()
        assert workers[0].call("forward")[0] == 3
        assert workers[0].call("shutdown") == []
        assert workers[0].call("forward")[0] == 3  # in memory of its own


@pytest.mark.above_the_ends
def test_answers_that_nobody_waits_for(make_scheme: Any) -> None:
    """A trainer that only ever sends and never waits: no worker comes to wait for room to answer."""
    model = fill(Small(), 1)
    with crew(1) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=1)
        workers.follow(scheme, Small)
        for version in range(2, 602):  # twice what a Unix socket holds
            scheme.send_async()
            workers[0].call("receive")
            assert scheme.version == version
        fill(model, 7)
        report = scheme.send()
        assert report is not None and report.version == 602
        assert workers[0].call("forward")[0] == 7


@pytest.mark.above_the_ends
def test_no_answer_is_forgotten(make_scheme: Any) -> None:
    model = fill(Tail(), 1)
    with crew(2) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers.follow(scheme, Tail)
        model.note = "refuse 0"
        scheme.send_async(worker_ids=0)
        model.note = "fine"
        scheme.send(worker_ids=1)  # says nothing about worker 0
        with pytest.raises(wsync.WorkerFailed, match=r"(?s)worker 0.*ArithmeticError"):
            scheme.wait_async()
        model.note = "refuse 0"
        scheme.send_async(worker_ids=0)
        model.note = "fine"
        scheme.send_async(worker_ids=1)
        with pytest.raises(wsync.WorkerFailed, match=r"(?s)worker 0.*ArithmeticError"):
            scheme.wait_async()
        report = scheme.wait_async()
        assert report is not None and dict(report.workers) == {1: 5}


@pytest.mark.parametrize("make_scheme", ["distributed", "shared_mem"], indirect=True)
def test_words_that_a_stopped_worker_does_not_read_keep_nobody_waiting(make_scheme: Any) -> None:
    model = Tail()
    with crew(2) as workers, make_scheme(timeout=3.0) as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers.follow(scheme, Tail)
        workers[0].stop()
        try:
            model.note = bytes(16 << 20)  # more than the line takes at once
            with pytest.raises(wsync.SyncTimeout) as late:
                scheme.send(fill(model, 2))
            assert set(late.value.workers) == {0}
            assert workers[1].call("forward")[0] == 2
        finally:
            workers[0].resume()
        model.note = "little"
        scheme.timeout = 30.0
        scheme.send(fill(model, 3))
        assert workers.all("digest") == [digest(model)] * 2


@pytest.mark.above_the_ends
def test_what_a_newer_send_leaves_out_is_waited_for(make_scheme: Any) -> None:
    model = fill(Small(), 1)
    with crew(2) as workers, make_scheme(timeout=2.0) as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers.follow(scheme, Small)
        workers[1].stop()
        try:
            scheme.send_async(fill(model, 2))
            scheme.send(fill(model, 3), worker_ids=0)
            with pytest.raises(wsync.SyncTimeout, match="worker 1"):
                scheme.wait_async()
        finally:
            workers[1].resume()
        assert scheme.wait_async() is None
        assert workers[0].call("forward")[0] == 3


@pytest.mark.above_the_ends
def test_no_answer_is_awaited_twice(make_scheme: Any) -> None:
    model = fill(Small(), 1)
    with crew(2) as workers, crew(1) as spare, make_scheme(timeout=20.0) as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers.follow(scheme, Small)
        scheme.send_async(fill(model, 2))
        wsync.synchronize({scheme: fill(model, 3)})
        assert scheme.wait_async() is None
        scheme.send_async(fill(model, 4))
        scheme.send(fill(model, 5), worker_ids=1)
        report = scheme.wait_async()
        assert report is not None and dict(report.workers) == {0: 4}
        scheme.send_async(fill(model, 6))
        workers[1].kill()
        spare[0].start("join", scheme, Small, 1, "policy")
        scheme.readmit(1)
        assert spare[0].result() == 6
        report = scheme.wait_async()
        assert report is not None and dict(report.workers) == {0: 6}
        spare[0].stop()
        scheme.send_async(fill(model, 7))
        scheme.dismiss(1)
        report = scheme.wait_async()
        assert report is not None and dict(report.workers) == {0: 7}
        spare[0].resume()


@pytest.mark.above_the_ends
def test_a_successor_has_what_its_predecessor_was_sent(make_scheme: Any) -> None:
    """Not what somebody else was sent since, into memory that the predecessor did not need any more."""
    model = fill(Small(), 1)
    with crew(2) as workers, crew(1) as spare, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers.follow(scheme, Small)
        scheme.send(fill(model, 2))
        workers.all("forward")
        scheme.send(fill(model, 3), worker_ids=1)
        workers.succeed(0, spare, scheme, Small)
        assert [worker.call("forward")[0] for worker in workers] == [2, 3]


@pytest.mark.parametrize("make", [Small, Tail])
def test_a_worker_that_was_dismissed_comes_back(make_scheme: Any, make: Any) -> None:
    """By ``connect`` on the scheme that it has: with what it had had, what the others were sent, and what comes."""
    model = fill(make(), 1)
    with crew(2) as workers, make_scheme(timeout=20.0) as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers.follow(scheme, make)
        for value in (2, 4, 6):
            scheme.send(fill(model, value))
            scheme.dismiss(1)
            with suppress(RemoteError):  # the second time it is told that there will be no more, if not the first time
                workers[1].call("receive", 20.0)
                workers[1].call("receive", 20.0)
            if value == 4:
                scheme.send(fill(model, value + 0.5))
            workers[1].start("connect")
            scheme.readmit(1)
            assert workers[1].result() == scheme.version
            for later in (value + 1, value + 1.25, value + 1.5, value + 1.75):
                scheme.send(fill(model, later))
                assert workers.all("forward") == [model().tolist()] * 2


def test_worker_that_leaves(make_scheme: Any) -> None:
    model = fill(Small(), 1)
    with crew(2) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers.follow(scheme, Small)
        assert workers[1].call("shutdown") == []
        with pytest.raises(wsync.WorkerDied, match="shut down its end"):
            scheme.send(fill(model, 2))
        scheme.send(fill(model, 3))
        assert workers[0].call("forward")[0] == 3
        assert workers[1].call("forward")[0] in (1, 2)


def shut_down_under_receive(host: Host) -> str:
    """Shut down while another thread waits in ``receive``: what that one was told."""
    scheme, told = host.schemes["policy"], queue.SimpleQueue[str]()
    at_the_door = threading.Event()

    def wait() -> None:
        at_the_door.set()
        try:
            scheme.receive()
        except wsync.NotConnected as error:
            told.put(str(error))

    threading.Thread(target=wait, daemon=True).start()
    at_the_door.wait()
    with suppress(queue.Empty):
        told.get(timeout=0.3)  # time to begin to wait; whether it has makes no difference
    scheme.shutdown()
    return told.get(timeout=10.0)


def test_shutdown_ends_a_receive_that_waits(make_scheme: Any) -> None:
    with crew(1) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=Small(), num_workers=1)
        workers.follow(scheme, Small)
        assert "shut down" in workers[0].call("run", shut_down_under_receive)


def shut_down_with_something_staged(host: Host) -> int:
    """How much is staged in this process after this end has gone."""
    before = len(staged.staged)
    host.schemes["policy"].shutdown()
    return before - len(staged.staged)


def test_what_was_staged_goes_with_the_receiver(make_scheme: Any) -> None:
    with crew(1) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=Small(), num_workers=1)
        workers.follow(scheme, Small)
        scheme.sender.stage(None, None, 7)  # and there is no decision
        assert workers[0].call("run", shut_down_with_something_staged) == 1


@pytest.mark.above_the_ends  # tests/chaos kills actors in the same way
def test_a_dead_worker_is_replaced(make_scheme: Any) -> None:
    model = fill(Small(), 1)
    with crew(2) as workers, crew(1) as spare, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers.follow(scheme, Small)
        workers[1].kill()
        with pytest.raises(wsync.WorkerDied):
            scheme.send(fill(model, 2))
        spare[0].start("join", scheme, Small, 1, "policy")
        scheme.sender.admit(1)
        assert spare[0].result() == 2
        assert spare[0].call("forward")[0] == 2
        scheme.send(fill(model, 3))
        assert spare[0].call("forward")[0] == workers[0].call("forward")[0] == 3


@pytest.mark.above_the_ends
def test_whom_a_second_connect_lets_in_is_sent_updates(make_scheme: Any) -> None:
    model = fill(Small(), 1)
    with crew(2) as workers, crew(1) as spare, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers.follow(scheme, Small)
        workers[1].kill()
        with pytest.raises(wsync.WorkerDied):
            scheme.send(fill(model, 2))
        spare[0].start("join", scheme, Small, 1, "policy")
        establish(scheme)
        spare[0].result()
        report = scheme.send(fill(model, 3))
        assert report is not None and set(report.workers) == {0, 1}
        assert workers[0].call("forward")[0] == spare[0].call("forward")[0] == 3


@pytest.mark.above_the_ends
def test_a_successor_gets_what_its_predecessor_was_to_have(make_scheme: Any) -> None:
    with crew(2) as workers, crew(2) as spare, make_scheme() as scheme:
        scheme.init_on_sender("policy", params_map={0: fill(Small(), 1), 1: fill(Small(), 2)})
        workers.follow(scheme, Small)
        scheme.send({0: fill(Small(), 3), 1: fill(Small(), 4)})
        workers[0].kill()
        with pytest.raises(wsync.WorkerDied):
            scheme.send({0: fill(Small(), 5), 1: fill(Small(), 6)})
        spare[0].start("join", scheme, Small, 0, "policy")
        scheme.sender.admit(0)
        assert spare[0].result() == 3
        assert spare[0].call("forward")[0] == 5
        spare[0].kill()
        with pytest.raises(wsync.WorkerDied):
            scheme.send({0: fill(Small(), 7), 1: fill(Small(), 8)})
        scheme.send({1: fill(Small(), 9)})  # who is absent need not be named
        spare[1].start("join", scheme, Small, 0, "policy")
        scheme.sender.admit(0)
        assert spare[1].result() == 4
        assert spare[1].call("forward")[0] == 7
        assert workers[1].call("forward")[0] == 9


def test_a_death_that_nobody_has_noticed_yet(make_scheme: Any) -> None:
    model = fill(Small(), 1)
    with crew(1) as workers, crew(1) as spare, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=1)
        workers.follow(scheme, Small)
        scheme.send(fill(model, 2))
        workers[0].kill()
        spare[0].start("join", scheme, Small, 0, "policy")
        scheme.sender.admit(0)
        assert spare[0].result() == 2
        scheme.send(fill(model, 3))
        assert spare[0].call("forward")[0] == 3


@pytest.mark.above_the_ends
def test_a_successor_after_a_transaction(make_scheme: Any) -> None:
    """What was dropped is given to nobody, and what was decided to everybody, whoever was away then."""
    model = fill(Small(), 1)
    with crew(2) as workers, crew(2) as spare, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers.follow(scheme, Small)
        scheme.send(fill(model, 2))
        workers[1].kill()
        with pytest.raises(wsync.WorkerDied):
            wsync.synchronize({scheme: fill(model, 3)})
        assert workers[0].call("forward")[0] == 2
        spare[0].start("join", scheme, Small, 1, "policy")
        scheme.sender.admit(1)
        spare[0].result()
        assert spare[0].call("forward")[0] == 2
        spare[0].kill()
        with pytest.raises(wsync.WorkerDied):
            scheme.send(fill(model, 4))
        wsync.synchronize({scheme: fill(model, 5)})
        spare[1].start("join", scheme, Small, 1, "policy")
        scheme.sender.admit(1)
        spare[1].result()
        assert [worker.call("forward")[0] for worker in (workers[0], spare[1])] == [5, 5]
        scheme.send(fill(model, 6))
        assert [worker.call("forward")[0] for worker in (workers[0], spare[1])] == [6, 6]


def test_misuse(make_scheme: Any) -> None:
    with make_scheme() as scheme:
        for call in (scheme.send, scheme.send_async, scheme.wait_async, scheme.connect, scheme.receive):
            with pytest.raises(wsync.NotConnected):
                call()
        with pytest.raises(RuntimeError, match="sender first"):
            scheme.init_on_receiver("policy", model=Small())
        with pytest.raises(ValueError, match="one of model, weights"):
            scheme.init_on_sender("policy", model=Small(), weights=Small())
        with pytest.raises(ValueError, match="how many workers"):
            scheme.init_on_sender("policy", model=Small(), devices=["cpu"], num_workers=2)
        scheme.init_on_sender("policy", model=Small(), num_workers=1)
        with pytest.raises(RuntimeError, match="already"):
            scheme.init_on_sender("policy", model=Small(), num_workers=1)
        with pytest.raises(wsync.NotConnected, match="connect"):
            scheme.send()
    scheme.shutdown()


def numbered(*indices: int) -> SimpleNamespace:
    """A context with workers of these indices."""
    workers = [SimpleNamespace(worker_idx=index, sentinel=0) for index in indices]
    return SimpleNamespace(policy=Small(), remote_workers=workers)


@pytest.mark.above_the_ends
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"model": Small(), "num_workers": 2.0}, "whole number"),
        ({"model": Small(), "num_workers": "2"}, "whole number"),
        ({"model": Small(), "devices": "cpu"}, "one for each worker"),
        ({"model": "Small"}, "weights are a torch.nn.Module"),
        ({"weights": 3}, "weights are a torch.nn.Module"),
        ({"model": Small(), "device_map_fn": "cpu"}, "device_map_fn is a function"),
        ({"params_map": {0: Small()}, "device_map_fn": lambda worker, weights: weights}, "leave device_map_fn out"),
        ({"params_map": {False: Small(), True: Small()}}, "workers 0 to 1, not for"),
        ({"params_map": {"policy": Small()}}, "workers 0 to 0, not for"),
        ({"context": numbered(1, 2)}, "0 to 1"),
        ({"context": numbered(0, 0)}, "0 to 1"),
        ({"context": SimpleNamespace(policy=Small(), remote_workers=["worker 0"])}, "worker_idx"),
    ],
)
def test_an_init_that_is_refused_has_done_nothing(make_scheme: Any, given: Any, problem: str) -> None:
    with make_scheme() as scheme:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises((TypeError, ValueError, AttributeError), match=problem):
            scheme.init_on_sender("policy", **given)
        assert len(os.listdir("/proc/self/fd")) == before
        with pytest.raises(RuntimeError, match="sender first"):
            scheme.init_on_receiver("policy", model=Small())


def test_buffers_that_were_given_with_an_init_can_be_given_again() -> None:
    buffers = TensorDict({"weight": torch.ones(4)})
    with wsync.SharedMemWeightSyncScheme() as scheme:
        with pytest.raises(ValueError, match="at least 1"):
            scheme.init_on_sender("policy", cached_weights=buffers, num_workers=0)
        scheme.init_on_sender("policy", cached_weights=buffers, num_workers=1)
        with pytest.raises(RuntimeError, match="already initialised"):
            scheme.init_on_sender("policy", cached_weights=buffers, num_workers=1)


# --- several models ---


def test_two_models_together(make_scheme: Any) -> None:
    actor, critic = fill(Tail(), 1), fill(Tail(), 1)
    with crew(2) as workers, make_scheme() as first, make_scheme() as second:
        first.init_on_sender("actor", model=actor, num_workers=2)
        second.init_on_sender("critic", model=critic, num_workers=2)
        workers.follow(first, Tail, "actor")
        workers.follow(second, Tail, "critic")
        for value in range(2, 12):
            reports = wsync.synchronize({first: fill(actor, value), second: fill(critic, -value)})
            assert set(reports) == {"actor", "critic"}
            assert [seen[0] for seen in workers.all("forward", "actor")] == [value] * 2
            assert [seen[0] for seen in workers.all("forward", "critic")] == [-value] * 2
        before = workers.all("digest", "actor"), workers.all("digest", "critic")

        bad = fill(Tail(), 99)
        bad.note = "refuse 1"  # one model, on one worker
        with pytest.raises(wsync.WorkerFailed, match=r"(?s)worker 1.*ArithmeticError"):
            wsync.synchronize({first: fill(Tail(), 98), second: bad})
        assert (workers.all("digest", "actor"), workers.all("digest", "critic")) == before
        with pytest.raises(wsync.LayoutMismatch):
            wsync.synchronize({first: fill(Tail(), 98), second: Small(9)})
        assert (workers.all("digest", "actor"), workers.all("digest", "critic")) == before

        wsync.synchronize({first: fill(actor, 50), second: fill(critic, 51)}, worker_ids=0)
        assert [seen[0] for seen in workers.all("forward", "actor")] == [50, 11]
        assert [seen[0] for seen in workers.all("forward", "critic")] == [51, -11]
        first.send(fill(actor, 60))
        second.send(fill(critic, 61))
        assert [seen[0] for seen in workers.all("forward", "actor")] == [60, 60]
        assert [seen[0] for seen in workers.all("forward", "critic")] == [61, 61]


def test_a_send_waits_for_a_transaction(make_scheme: Any) -> None:
    with crew(1) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=1)
        workers.follow(scheme, Small)
        decide, threads = scheme.sender.decide, []

        def late(*args: Any) -> None:
            threads.append(threading.Thread(target=scheme.send, args=(fill(Small(), 3),)))
            threads[0].start()
            threads[0].join(0.3)  # it may come first, if nothing keeps it
            decide(*args)

        scheme.sender.decide = late
        assert wsync.synchronize({scheme: fill(Small(), 2)})["policy"].version == 2
        threads[0].join()
        assert workers.all("version") == [3]
        assert workers[0].call("forward")[0] == 3


def test_two_models_of_one_name(make_scheme: Any) -> None:
    with crew(1) as workers, make_scheme() as scheme, make_scheme() as other:
        for one in (scheme, other):
            one.init_on_sender("policy", model=fill(Small(), 1), num_workers=1)
        workers.follow(scheme, Small)
        with pytest.raises(ValueError, match="model_id of its own"):
            wsync.synchronize({scheme: fill(Small(), 2), other: fill(Small(), 3)})
        assert workers[0].call("forward")[0] == 1


def test_two_models_and_a_death(make_scheme: Any) -> None:
    actor, critic = fill(Small(), 1), fill(Small(), 1)
    with crew(2) as workers, make_scheme() as first, make_scheme() as second:
        first.init_on_sender("actor", model=actor, num_workers=2)
        second.init_on_sender("critic", model=critic, num_workers=2)
        workers.follow(first, Small, "actor")
        workers.follow(second, Small, "critic")
        workers[1].kill()
        with pytest.raises(wsync.WorkerDied):
            wsync.synchronize({first: fill(actor, 2), second: fill(critic, 2)})
        assert workers[0].call("forward", "actor")[0] == workers[0].call("forward", "critic")[0] == 1
        for value in range(3, 6):
            for _ in range(3):  # each scheme finds out for itself, and says so once
                try:
                    wsync.synchronize({first: fill(actor, value), second: fill(critic, value)})
                    break
                except wsync.WorkerDied:
                    continue
            assert workers[0].call("forward", "actor")[0] == workers[0].call("forward", "critic")[0] == value


# --- cascade ---


def test_who_leaves_between_vote_and_decision(make_scheme: Any) -> None:
    """A worker that has shut one of two models down switches the other one, and goes on."""
    actor, critic = fill(Small(), 1), fill(Small(), 1)
    with crew(1) as workers, make_scheme() as first, make_scheme() as second:
        first.init_on_sender("actor", model=actor, num_workers=1)
        second.init_on_sender("critic", model=critic, num_workers=1)
        workers.follow(first, Small, "actor")
        workers.follow(second, Small, "critic")
        staged = {scheme: scheme.sender.stage(fill(Small(), 2), None, 7) for scheme in (first, second)}
        workers[0].call("run", leave, "critic")
        for scheme, posted in staged.items():
            scheme.sender.decide(posted, 7)
        first.sender.settle(staged[first])
        with pytest.raises(wsync.WorkerDied):
            second.sender.settle(staged[second])
        assert workers[0].call("forward", "actor")[0] == 2
        first.send(fill(actor, 3))
        assert workers[0].call("forward", "actor")[0] == 3
        assert workers[0].call("forward", "critic")[0] == 1


def leave(host: Host, model_id: str) -> None:
    host.schemes[model_id].shutdown()


def test_who_does_not_read_holds_up_no_transaction_for_ever() -> None:
    model = fill(Small(), 1)
    with crew(1) as workers, wsync.SharedMemWeightSyncScheme(timeout=1.0) as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=1)
        workers.follow(scheme, Small)
        workers[0].stop()
        for value in range(2, 600):  # more words than a socket takes
            scheme.send_async(fill(model, value))
        before = time.monotonic()
        with pytest.raises(wsync.SyncTimeout, match="worker 0"):
            wsync.synchronize({scheme: fill(model, 600)})
        assert time.monotonic() - before < 10.0
        workers[0].resume()
        scheme.send(fill(model, 601))
        assert workers[0].call("forward")[0] == 601


@pytest.mark.parametrize("action", ["shutdown", "receive"])
def test_what_would_wait_for_itself_inside_the_gate_is_an_error(action: str) -> None:
    with crew(1) as workers, wsync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=1)
        workers.follow(scheme, Small)
        with pytest.raises(RemoteError, match="leave it first"):
            workers[0].call("run", inside_the_gate, action)
        scheme.send(fill(Small(), 2))
        assert workers[0].call("forward")[0] == 2


def inside_the_gate(host: Host, action: str) -> None:
    with wsync.gate():
        getattr(host.schemes["policy"], action)()


def test_receive_ends_in_time_whoever_holds_the_gate() -> None:
    model = fill(Small(), 1)
    with crew(1) as workers, wsync.SharedMemWeightSyncScheme(acknowledge="published") as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=1)
        workers.follow(scheme, Small)
        workers[0].call("run", begin_forward)
        scheme.send(fill(model, 2))
        assert workers[0].call("receive", 0.1) is None
        assert workers[0].call("run", end_forward) == [[1.0] * 4] * 2
        assert workers[0].call("receive", 20.0) is not None
        assert workers[0].call("forward")[0] == 2


def test_after_a_refusal_a_forward_sees_one_version() -> None:
    source: Any = fill(Apart(), 1)
    with crew(1) as workers, wsync.SharedMemWeightSyncScheme(acknowledge="published") as scheme:
        scheme.init_on_sender("policy", model=source, num_workers=1)
        workers.follow(scheme, Joined)
        source.other.data.fill_(2)
        scheme.send()
        workers[0].call("run", begin_forward)  # refuses that, since its own two are tied, and goes on with what it has
        with suppress(wsync.WorkerFailed):
            scheme.send(fill(source, 3))  # hears of it
        for value in range(4, 8):
            scheme.send(fill(source, value))
        assert workers[0].call("run", end_forward) == [[1.0] * 4] * 2
        assert workers[0].call("forward")[0] == 7


def begin_forward(host: Any) -> None:
    """A thread inside the gate looks at the weights, now and when it is told to end."""
    host.seen, host.end, begun = [], threading.Event(), threading.Event()

    def forward() -> None:
        with wsync.gate():
            host.seen.append(host.models["policy"].weight.tolist())
            begun.set()
            host.end.wait()
            host.seen.append(host.models["policy"].weight.tolist())

    host.thread = threading.Thread(target=forward, daemon=True)
    host.thread.start()
    begun.wait()


def end_forward(host: Any) -> list[list[float]]:
    host.end.set()
    host.thread.join()
    return host.seen


@pytest.mark.above_the_ends
def test_cascade(make_scheme: Any) -> None:
    model = fill(Small(), 1)
    with crew(1) as workers, make_scheme() as upper:
        if getattr(upper, "acknowledge", "installed") == "published":
            pytest.skip("is refused: see below")
        upper.init_on_sender("policy", model=model, num_workers=1)
        # What has sent by RPC or Ray to a machine goes on there by its memory, as a node's workers would have it.
        lower = make_scheme() if kind() == "process" else wsync.SharedMemWeightSyncScheme(timeout=30.0)
        method = "fork" if kind() == "process" else "forkserver"  # RPC and Ray do not survive a fork
        workers[0].start("run", become_middle, upper, lower, Small, method)
        establish(upper)
        workers[0].result()
        assert [seen[0] for seen in workers[0].call("run", below_forward)] == [1, 1]
        for value in range(2, 8):
            upper.send(fill(model, value))
            assert [seen[0] for seen in workers[0].call("run", below_forward)] == [value, value]
        upper.send_async(fill(model, 8))  # asks for an answer in any case
        upper.wait_async()
        assert [seen[0] for seen in workers[0].call("run", below_forward)] == [8, 8]
        workers[0].call("run", break_cascade, True)
        with pytest.raises(wsync.WorkerFailed, match=r"(?s)cascade_weights.*the cascade broke"):
            upper.send_async(fill(model, 9))
            upper.wait_async()
        workers[0].call("run", break_cascade, False)
        upper.send_async(fill(model, 10))
        upper.wait_async()
        assert [seen[0] for seen in workers[0].call("run", below_forward)] == [10, 10]
        workers[0].call("run", close_below)


def test_what_waits_for_no_answer_is_not_passed_on() -> None:
    with wsync.SharedMemWeightSyncScheme(acknowledge="published") as upper:
        upper.init_on_sender("policy", model=Small(), num_workers=1)
        below = pickle.loads(pickle.dumps(upper))
        with pytest.raises(ValueError, match="give the scheme acknowledge='installed'"):
            below.init_on_receiver("policy", CascadingHost(Small(), upper), worker_idx=0)


@pytest.mark.above_the_ends
def test_hard_model_survives_a_dead_worker(make_scheme: Any) -> None:
    with crew(2) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=Hard(), num_workers=2)
        workers.follow(scheme, Hard)
        workers[0].kill()
        with pytest.raises(wsync.WorkerDied, match="worker 0"):
            scheme.send()
        scheme.send()
