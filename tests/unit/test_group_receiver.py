"""A worker's end of a line across a network: what comes of a signal in it, and of a trainer that dies."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import wsync
from wsync.deadlines import deadline_in, wait_readable
from wsync.group import Meeting, MeetingPlace, finish, patience
from wsync.layout import Layout
from wsync.network import NetListener
from wsync.network_ends import Seed, network_receiver
from wsync.plan import Plan
from wsync.receiver_thread import LineHandler
from wsync.snapshot import Snapshot
from wsync.words import Kind, Line, Message

pytestmark = pytest.mark.timeout(30)


class Interrupted(nn.Module):
    """A signal strikes once while it takes its extra state, when it is told so."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), value))
        self.state = value
        self.strike = False

    def get_extra_state(self) -> float:
        return self.state

    def set_extra_state(self, state: float) -> None:
        if self.strike:
            self.strike = False
            raise KeyboardInterrupt
        self.state = state

    def forward(self) -> tuple[float, float]:
        return self.weight[0].item(), self.state


class ByHand:
    """The test tells the receiver of what its line has (an ``Attach``), in the thread in which signals strike."""

    def attach(self, line: Line, receiver: LineHandler) -> None:
        self.line, self.receiver = line, receiver

    def detach(self, line: Line, receiver: LineHandler) -> None: ...

    def alive(self, line: Line) -> bool:
        return True

    def tell(self) -> bool:
        assert wait_readable(self.line.signs, deadline_in(10.0))
        return self.receiver.on_readable()


@contextmanager
def connected(model: nn.Module, acting: nn.Module) -> Iterator[tuple[Any, ByHand, ThreadPoolExecutor]]:
    """A trainer's scheme, and a worker in this process that follows it by hand."""
    hand = ByHand()
    with wsync.DistributedWeightSyncScheme(timeout=10.0) as scheme, ThreadPoolExecutor(1) as trainer:
        scheme.init_on_sender("policy", model=model, num_workers=1)
        worker = pickle.loads(pickle.dumps(scheme))
        worker.init_on_receiver("policy", model=acting, worker_idx=0)
        worker.receiver._end._telling = hand
        connecting = trainer.submit(scheme.connect)
        worker.connect()
        connecting.result()
        yield scheme, hand, trainer
        worker.shutdown()


def test_an_interrupted_installation_is_made_good_by_the_next_forward() -> None:
    model, acting = Interrupted(1.0), Interrupted()
    with connected(model, acting) as (scheme, hand, trainer):
        for value in (2.0, 3.0):
            nn.init.constant_(model.weight, value)
            model.state, acting.strike = value, True
            sending = trainer.submit(scheme.send)
            with pytest.raises(KeyboardInterrupt):
                hand.tell()
            assert not sending.done()
            assert acting() == (value, value)
            assert dict(sending.result().workers) == {0: scheme.version}


@contextmanager
def played() -> Iterator[tuple[NetListener, MeetingPlace]]:
    """A trainer that the test plays, word by word."""
    door, place = NetListener("127.0.0.1"), MeetingPlace("127.0.0.1", "gloo")
    try:
        yield door, place
    finally:
        door.close()
        place.close()


def let_in(door: NetListener, place: MeetingPlace, plan: Plan, value: float | None) -> Line:
    """Let a worker in, announce weights, and send them; or (None) break off."""
    while (visitor := door.accept()) is None:
        assert wait_readable([door.fileno()], deadline_in(10.0))
    line, _ = visitor
    line.send(Message(Kind.WELCOME, 0, 1, plan.dump()))
    pair = place.pair(0, plan.generation, deadline_in(10.0))()
    line.send(Message(Kind.NEWS, 0, 1))
    assert plan.layout is not None
    flat = torch.zeros(plan.layout.nbytes, dtype=torch.uint8)
    if value is None:
        pair.close()
        return line
    plan.layout.views(flat)[0].fill_(value)
    finish(pair.send(flat), patience(10.0), flat.device)
    return line


def test_a_trainer_that_dies_in_the_first_transfer_leaves_nothing_of_it_for_the_next() -> None:
    layout = Layout.of(Snapshot({"weight": torch.zeros(4)}))
    with played() as (door, place), ThreadPoolExecutor(1) as trainer:
        meeting: Meeting = place.meeting
        end = network_receiver(
            lambda worker, deadline: Seed(door.endpoint, meeting), backend="gloo", retains=True, timeout=10.0
        )
        dying = trainer.submit(let_in, door, place, Plan(layout, False, 1, 1), None)
        with pytest.raises(wsync.NotConnected, match="process group"):
            end.connect(0, deadline_in(10.0))
        living = trainer.submit(let_in, door, place, Plan(layout, False, 1, 2), 7.0)
        end.connect(0, deadline_in(10.0))
        update = end.enter()
        assert update is not None and update.views[0].tolist() == [7.0] * 4
        end.close()
        for line in (dying.result(), living.result()):
            line.close()
