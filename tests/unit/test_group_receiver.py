"""A worker's end of a line across a network: what comes of a signal in it, and of a trainer that dies."""

from __future__ import annotations

import fcntl
import gc
import os
import pickle
import socket
import struct
import termios
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from striking import struck_at
from torch import nn

import wsync
from wsync import native
from wsync.deadlines import deadline_in, wait_readable
from wsync.network.ends import Seed, network_receiver
from wsync.network.forming import formed
from wsync.network.group import finish, patience
from wsync.network.listening import listen_on
from wsync.network.meeting import Meeting, MeetingPlace
from wsync.network.tcp import NetListener
from wsync.receiving.receiver_thread import LineHandler
from wsync.weights.layout import Layout
from wsync.weights.snapshot import Snapshot
from wsync.wire.plan import Plan
from wsync.wire.words import Kind, Line, Message

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
    """The test tells the receiver of what its line has, in the thread in which signals strike."""

    def takes_over(self, dial: Callable[..., Any]) -> Callable[..., Any]:
        def dialled(worker: int, deadline: float | None) -> Any:
            self.line = dial(worker, deadline)
            self.line.attach, self.line.detach = self.attach, lambda receiver: None
            return self.line

        return dialled

    def attach(self, receiver: LineHandler) -> None:
        self.receiver = receiver

    def tell(self) -> bool:
        assert wait_readable(self.line.signs, deadline_in(10.0))
        return self.receiver.on_readable()


@contextmanager
def connected(
    model: nn.Module, acting: nn.Module, *, bind: bool = True
) -> Iterator[tuple[Any, ByHand, ThreadPoolExecutor]]:
    """A trainer's scheme, and a worker in this process that follows it by hand."""
    hand = ByHand()
    with wsync.DistributedWeightSyncScheme(timeout=10.0, bind=bind) as scheme, ThreadPoolExecutor(1) as trainer:
        scheme.init_on_sender("policy", model=model, num_workers=1)
        worker = pickle.loads(pickle.dumps(scheme))
        worker.init_on_receiver("policy", model=acting, worker_idx=0)
        worker.receiver._end._dial = hand.takes_over(worker.receiver._end._dial)
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
def in_the_habit(
    model: nn.Module, acting: nn.Module, *, bind: bool = True
) -> Iterator[tuple[Any, Callable[[], Future[Any]], ByHand]]:
    """A worker that has had a usual update, and whose line is read when the test does; the sender, what sends."""
    if not native.available:
        pytest.skip("the compiled fast path was not built here")
    with connected(model, acting, bind=bind) as (scheme, hand, trainer):
        first = trainer.submit(scheme.send)
        assert hand.tell() and first.result()
        yield scheme.sender, partial(trainer.submit, scheme.send), hand


def acts(acting: Any) -> float:
    with torch.no_grad():
        return acting(torch.ones(4)).item()


def acts_until(sending: Future[Any], acting: Any) -> float:
    """What it gives once an update was sent, which ends in time in any case."""
    while not sending.done():
        acts(acting)
    assert sending.result()
    return acts(acting)


def test_an_acting_thread_takes_what_the_listening_one_does_not_come_to() -> None:
    model, acting = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)
    with in_the_habit(model, acting) as (_, send, hand):
        for value in range(1, 300):  # announcements do not pile up
            nn.init.constant_(model.weight, value)
            assert acts_until(send(), acting) == 4 * value
        assert hand.tell() and not hand.line.readable(), "one is left, of what it has"
        assert hand.receiver.on_readable(), "the acting thread may have read what it was called for"
        nn.init.zeros_(model.weight)
        sending = send()
        assert hand.tell() and sending.result() and acts(acting) == 0


def test_an_acting_thread_leaves_what_was_said_before_an_update_to_the_listening_one() -> None:
    model, acting = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)
    with in_the_habit(model, acting) as (sender, send, hand):
        sender._end._lines.say(0, Message(Kind.ASK, 0))
        nn.init.constant_(model.weight, 1.0)
        sending = send()
        assert hand.line.peek().kind is Kind.ASK
        for _ in range(100):
            assert acts(acting) != 4.0
        assert hand.tell(), "this says once more what was said"
        assert acts_until(sending, acting) == 4.0


def unread(line: Any) -> int:
    """How many bytes have come that nobody has read."""
    (count,) = struct.unpack("i", fcntl.ioctl(line.fileno(), termios.FIONREAD, bytes(4)))
    return count


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # struck as a generator was closed
@pytest.mark.parametrize("bind", [True, False])
def test_wherever_an_acting_thread_is_interrupted_the_next_forward_has_the_update_and_has_said_so(bind: bool) -> None:
    model, acting = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)
    with in_the_habit(model, acting, bind=bind) as (_, send, hand):
        follower: Any = hand.receiver
        install, say, answered = follower._install, follower._end.say, {0}

        def once(message: Message, index: int) -> bool:
            assert message.version not in answered, "its buffer may have another version in it by now"
            return install(message, index)

        def note(answer: Message) -> None:
            answered.add(answer.version)
            say(answer)

        follower._install, follower._end.say = once, note
        for point in count(1):
            before = unread(hand.line)  # an announcement that the other thread has not come to
            nn.init.constant_(model.weight, point)
            sending = send()
            while unread(hand.line) == before:
                assert not sending.done(), sending.result()
            with torch.no_grad():  # not within: it would not be left, where that is struck
                finished = struck_at(point, partial(acting, torch.ones(4)))
            assert acts_until(sending, acting) == 4 * point
            if finished:
                break
        assert point > 80
        assert torch.is_grad_enabled()


def test_what_the_listening_thread_comes_with_too_late_is_not_installed_again() -> None:
    model, acting = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)
    fetched, over = threading.Event(), threading.Event()
    with in_the_habit(model, acting) as (_, send, hand):
        landing: Any = hand.receiver._landing  # pyright: ignore[reportAttributeAccessIssue]
        fetch, late = landing.fetch, threading.Thread(target=hand.tell)

        def come_late(version: int) -> int:
            index = fetch(version)
            fetched.set()
            assert over.wait(10.0)
            return index

        def be_overtaken(version: int) -> int:
            landing.fetch = come_late
            late.start()
            assert fetched.wait(10.0)
            landing.fetch = fetch
            return fetch(version)

        landing.fetch = be_overtaken
        for value in (1, 2):
            nn.init.constant_(model.weight, value)
            assert acts_until(send(), acting) == 4 * value
        over.set()
        late.join()
        assert acting.weight.tolist() == [[2.0] * 4]


@pytest.mark.parametrize("bind", [True, False])
def test_both_threads_of_a_worker_may_take_an_update(bind: bool) -> None:
    model, acting = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)
    seen: list[float] = []
    with wsync.DistributedWeightSyncScheme(timeout=10.0, bind=bind) as scheme, ThreadPoolExecutor(2) as threads:
        nn.init.zeros_(model.weight)
        scheme.init_on_sender("policy", model=model, num_workers=1)
        worker = pickle.loads(pickle.dumps(scheme))
        worker.init_on_receiver("policy", model=acting, worker_idx=0)
        connecting = threads.submit(scheme.connect)
        worker.connect()
        connecting.result()
        over = threading.Event()

        def act() -> None:
            while not over.is_set():
                seen.append(acts(acting))

        forwards = threads.submit(act)
        for value in range(1, 500):
            nn.init.constant_(model.weight, value)
            scheme.send()
            before = len(seen)
            assert acts(acting) == 4 * value
            assert all(one == 4 * value for one in seen[before + 1 :])
        over.set()
        forwards.result()
        assert seen == sorted(seen)
        worker.shutdown()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_worker_that_comes_back_is_given_what_it_has_had_and_what_comes_after_it(shared_memory: bool) -> None:
    model, acting = nn.Linear(4, 1), nn.Linear(4, 1)
    with (
        wsync.DistributedWeightSyncScheme(timeout=10.0, checksum=False, shared_memory=shared_memory) as scheme,
        ThreadPoolExecutor(1) as trainer,
    ):
        scheme.init_on_sender("policy", model=model, num_workers=1)
        worker = pickle.loads(pickle.dumps(scheme))
        worker.init_on_receiver("policy", model=acting, worker_idx=0)
        meet: Callable[[], object] = scheme.connect
        for value in (1.0, 2.0):
            meeting = trainer.submit(meet)
            worker.connect()
            meeting.result()
            scheme.send()
            nn.init.constant_(model.weight, value)
            scheme.send()
            assert acting.weight.tolist() == [[value] * 4]
            scheme.dismiss(0)
            with pytest.raises(wsync.NotConnected):
                worker.receive(10.0)
                worker.receive(10.0)
            meet = partial(scheme.readmit, 0)
        worker.shutdown()


@contextmanager
def played() -> Iterator[tuple[NetListener, MeetingPlace]]:
    """A trainer that the test plays, word by word."""
    door, place = NetListener("127.0.0.1"), MeetingPlace("127.0.0.1", "gloo")
    try:
        yield door, place
    finally:
        door.close()
        place.close()


def welcome(door: NetListener, plan: Plan) -> Line:
    """Let a worker in; the line to it."""
    while (visitor := door.accept()) is None:
        assert wait_readable([door.fileno()], deadline_in(10.0))
    line, _ = visitor
    line.send(Message(Kind.WELCOME, 0, 1, plan.dump()))
    return line


def let_in(door: NetListener, place: MeetingPlace, plan: Plan, value: float | None) -> Line:
    """Let a worker in, announce weights, and send them; or (None) break off."""
    line = welcome(door, plan)
    pair = place.pair(0, plan.generation, deadline_in(10.0))()
    line.send(Message(Kind.NEWS, 0, 1))
    assert plan.layout is not None
    flat = torch.zeros(plan.layout.nbytes, dtype=torch.uint8)
    if value is None:
        pair.close()
        return line
    plan.layout.views(flat)[0].fill_(value)
    works: list[Any] = []
    pair.send(flat, works)
    finish(works[0], patience(10.0), flat.device)
    return line


def test_a_trainer_that_dies_in_the_first_transfer_leaves_nothing_of_it_for_the_next() -> None:
    layout = Layout.of(Snapshot({"weight": torch.zeros(4)}))
    with played() as (door, place), ThreadPoolExecutor(1) as trainer:
        meeting: Meeting = place.meeting
        end = network_receiver(
            lambda worker, deadline: [Seed(door.endpoint, meeting)], backend="gloo", retains=True, timeout=10.0
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


@contextmanager
def nothing_left_open() -> Iterator[None]:
    """Around whatever is to be closed; also a store, whose own thread closes what its visitors have left."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


@contextmanager
def welcomed(meeting: Meeting, timeout: float) -> Iterator[tuple[Future[None], Line]]:
    """A worker was let in, and forms its pair alone; the rest of its rendezvous, and the trainer's line to it."""
    door, layout = NetListener("127.0.0.1"), Layout.of(Snapshot({"weight": torch.zeros(4)}))
    end = network_receiver(
        lambda worker, deadline: [Seed(door.endpoint, meeting)], backend="gloo", retains=True, timeout=10.0
    )
    with ThreadPoolExecutor(1) as worker:
        connecting = worker.submit(end.connect, 0, deadline_in(timeout))
        line = welcome(door, Plan(layout, False, 1, 1))
        yield connecting, line
        line.close()
        door.close()
    for thread in [thread for thread in threading.enumerate() if thread.name == "wsync-forming"]:
        thread.join(10.0)
        assert not thread.is_alive(), "nobody waits for the pair any more"


def test_what_a_pair_that_was_not_formed_held_is_let_go_of_at_once() -> None:
    class Descriptors:
        """As many as gloo takes."""

    held: list[weakref.ref[Descriptors]] = []

    def fail() -> Any:
        descriptors = Descriptors()
        held.append(weakref.ref(descriptors))
        raise RuntimeError("the other half hung up")

    gc.disable()  # it may be long until it runs
    try:
        with pytest.raises(RuntimeError, match="hung up"):
            formed(fail, [], lambda: False, deadline_in(10.0))
        assert [reference() for reference in held] == [None]
    finally:
        gc.enable()


def test_a_worker_waits_for_a_stopped_trainer_until_its_deadline() -> None:
    with (
        nothing_left_open(),
        listen_on("127.0.0.1") as stopped,  # visitors come in, and are not answered
        welcomed(Meeting(*stopped.getsockname(), "gloo"), timeout=0.5) as (connecting, _),
    ):
        with pytest.raises(wsync.SyncTimeout, match="is the sender stopped"):
            connecting.result(10.0)
        stopped.shutdown(socket.SHUT_RDWR)


def test_a_worker_that_is_hung_up_on_waits_for_its_pair_no_longer() -> None:
    with nothing_left_open(), played() as (_, place), welcomed(place.meeting, timeout=25.0) as (connecting, line):
        line.close()
        with pytest.raises(wsync.NotConnected, match="went away"):
            connecting.result(10.0)
        place.pair(0, 1, deadline_in(10.0))().close()  # nobody wants it by now, but it ends the worker's thread
