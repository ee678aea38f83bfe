"""Shared memory: what a forward uses, nobody writes, whatever else its process does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count

import pytest
import torch
from contract_models import Apart, Small, fill
from crew import Host, ProcessRemote, crew
from striking import struck_at
from torch import nn

import wsync
from wsync.local import sender as local_sender

pytestmark = pytest.mark.timeout(60)


def fork_often(over: threading.Event) -> None:
    for _ in range(60):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    over.set()


def act_while_forking(host: Host) -> tuple[int, int]:
    """Forwards, and how many of them saw two versions."""
    over, waste = threading.Event(), torch.ones(256, 256)
    forks = threading.Thread(target=fork_often, args=(over,))
    forks.start()
    forwards = torn = 0
    while not over.is_set():
        with wsync.gate():
            first = host.models["policy"].weight[0].item()
            for _ in range(4):
                waste @ waste
            torn += host.models["policy"].weight[-1].item() != first
        forwards += 1
    forks.join()
    return forwards, torn


def test_a_child_says_nothing_about_its_parents_forwards() -> None:
    model = fill(Small(), 1)
    with crew(1) as workers, wsync.SharedMemWeightSyncScheme(acknowledge="published") as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=1)
        workers.follow(scheme, Small)
        worker = workers[0]
        assert isinstance(worker, ProcessRemote)
        worker.start("run", act_while_forking)
        for value in count(2):
            scheme.send(fill(model, value))
            if worker.pipe.poll(0):
                break
        forwards, torn = worker.result()
        assert (forwards > 60, torn) == (True, 0), forwards


def halve(model: nn.Module) -> None:
    model.other.data = model.other.data.half()


def add(model: nn.Module) -> None:
    model.added = nn.Linear(2, 2)


def begin_changed(host: Host, change: Callable[[nn.Module], None] | None = None) -> None:
    """Change the model; then, or if nothing is to be changed, begin a forward."""
    if change is not None:
        change(host.models["policy"])
        return
    host.inside = wsync.gate()  # pyright: ignore[reportAttributeAccessIssue]
    host.inside.__enter__()  # pyright: ignore[reportAttributeAccessIssue]


def look(host: Host) -> float:
    return host.models["policy"].weight[0].item()


def leave(host: Host) -> None:
    host.inside.__exit__(None, None, None)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("change", [halve, add])
def test_a_forward_that_finds_an_update_refused_keeps_what_it_has(change: Callable[[nn.Module], None]) -> None:
    model = fill(Apart(), 1)
    with crew(1) as workers, wsync.SharedMemWeightSyncScheme(acknowledge="published") as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=1)
        workers.follow(scheme, Apart)
        scheme.send(fill(model, 2))
        assert workers[0].call("forward")[0] == 2
        workers[0].call("run", begin_changed, change)
        scheme.send(fill(model, 3))
        workers[0].call("run", begin_changed)
        assert workers[0].call("run", look) == 2
        with pytest.raises(wsync.WorkerFailed):
            scheme.send(fill(model, 4))
        for value in range(5, 9):
            scheme.send(fill(model, value))
        assert workers[0].call("run", look) == 2
        workers[0].call("run", leave)


def take_out(host: Host) -> None:
    """Replace a parameter, and keep the old one."""
    host.old = host.models["policy"].other  # pyright: ignore[reportAttributeAccessIssue]
    host.models["policy"].other = nn.Parameter(torch.zeros(4))


def old_value(host: Host) -> float:
    return host.old[0].item()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_parameter_that_was_taken_out_is_the_workers_own() -> None:
    model = fill(Apart(), 1)
    with crew(2) as workers, wsync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers.follow(scheme, Apart)
        workers[0].call("run", take_out)
        for value in range(2, 9):
            scheme.send(fill(model, value))
            assert workers[0].call("run", old_value) == 1


def wait_twice(host: Host) -> None:
    """One thread waits for long; another gives up."""
    host.received = []  # pyright: ignore[reportAttributeAccessIssue]
    scheme = host.schemes["policy"]
    host.waiting = threading.Thread(target=lambda: host.received.append(scheme.receive(50.0)))  # pyright: ignore
    host.waiting.start()  # pyright: ignore[reportAttributeAccessIssue]
    assert scheme.receive(0.5) is None


def has_received(host: Host) -> bool:
    host.waiting.join(20.0)  # pyright: ignore[reportAttributeAccessIssue]
    return bool(host.received) and host.received[0] is not None  # pyright: ignore[reportAttributeAccessIssue]


def test_who_gives_up_leaves_others_waiting_to_be_woken() -> None:
    with crew(1) as workers, wsync.SharedMemWeightSyncScheme(acknowledge="published") as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=1)
        workers.follow(scheme, Small)
        workers[0].call("run", wait_twice)
        scheme.send(fill(Small(), 2))
        assert workers[0].call("run", has_received)


def hold_the_switch(host: Host) -> None:
    """As if stopped in the midst of entering."""
    host.schemes["policy"].receiver._end._switch._mutex.lock()  # pyright: ignore[reportAttributeAccessIssue]


def test_who_is_stopped_in_the_midst_can_be_dismissed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_sender, "_SWITCH_TIMEOUT", 0.2)
    with crew(1) as workers, wsync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=1)
        workers.follow(scheme, Small)
        workers[0].call("run", hold_the_switch)
        workers[0].stop()
        dismissal = threading.Thread(target=scheme.dismiss, args=(0,))
        dismissal.start()
        dismissal.join(20.0)
        in_time = not dismissal.is_alive()
        workers[0].kill()
        dismissal.join()
        assert in_time


def receive_struck(host: Host) -> int:
    """At how many points a signal can strike ``receive``, if after each another thread can receive."""
    receive = host.schemes["policy"].receive

    def receive_here() -> None:
        with suppress(RuntimeError):  # what threading.Condition makes of a signal as it lets its lock go
            receive(0.0)

    for point in count(1):
        finished = struck_at(point, receive_here)
        other = threading.Thread(target=receive, args=(0.0,), daemon=True)
        other.start()
        other.join(20.0)
        assert not other.is_alive(), f"struck at point {point}"
        if finished:
            return point


def test_a_signal_that_strikes_in_receive_leaves_nothing_locked() -> None:
    with crew(1) as workers, wsync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=1)
        workers.follow(scheme, Small)
        assert workers[0].call("run", receive_struck) > 20
        scheme.send(fill(Small(), 2))
        assert workers[0].call("forward")[0] == 2
