"""The trainer's end of lines across a network, with workers that are played here, word by word."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from wsync.deadlines import deadline_in, wait_readable
from wsync.network.group import GroupPair
from wsync.network.meeting import MeetingPlace
from wsync.network.pair import Outgoing
from wsync.network.sender import GroupSender
from wsync.network.tcp import NetLine, NetListener, dial
from wsync.weights.layout import Layout
from wsync.weights.snapshot import Snapshot
from wsync.wire.words import Kind, Message

pytestmark = pytest.mark.timeout(30)


class Tensors(GroupPair):
    """A line of tensors that leads nowhere, and may break."""

    def __init__(self) -> None:
        super().__init__(None, 0)
        self.broken = False

    def send(self, flat: torch.Tensor, works: list[Any]) -> None:
        if self.broken:
            raise RuntimeError("Connection closed by peer")
        works.append(flat)


class Stage:
    """A sender of one tensor, and its workers."""

    def __init__(self, count: int) -> None:
        self.pairs: dict[int, Tensors] = {}
        door = NetListener("127.0.0.1")
        self.endpoint = door.endpoint
        self.end = GroupSender(count, door, self)
        self.end.prepare(Layout.of(Snapshot({"weight": torch.zeros(4)})))
        self.lines: dict[int, NetLine] = {}
        for worker in range(count):
            self.join(worker)

    def pair(self, worker: int, generation: int, deadline: float | None) -> Callable[[], Outgoing]:
        self.pairs[worker] = Tensors()
        return lambda: self.pairs[worker]

    def room(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def close(self) -> None:
        """Nothing is kept."""

    def join(self, worker: int) -> None:
        self.lines[worker] = dial(self.endpoint, worker, deadline_in(10.0))
        self.end.admit([worker], {}, deadline_in(10.0))
        self.expect(worker, Kind.WELCOME)

    def publish(self, version: int, *workers: int) -> None:
        self.end.publish(self.end.reserve(workers, None), version, b"", workers, True)

    def answer(self, worker: int, version: int) -> None:
        self.lines[worker].send(Message(Kind.ACK, worker, version))

    def expect(self, worker: int, kind: Kind, version: int = 0) -> None:
        message = self.lines[worker].receive()
        assert message is not None and (message.kind, message.version) == (kind, version)


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage(2)
    yield stage
    stage.end.close()
    for line in stage.lines.values():
        line.close()


def test_a_broken_pair_harms_no_other_worker(stage: Stage) -> None:
    """While one worker is found to be gone, another's answer is read: it is not waited for again."""
    with stage.end._lock:  # the courier is kept away: both answers are there when they are read
        stage.publish(1, 0, 1)
        stage.publish(2, 0)
        stage.pairs[0].broken = True
        stage.answer(0, 1)
        stage.answer(1, 1)
        before = time.monotonic()
        (ack,) = stage.end.collect([1], 1, deadline_in(10.0))
        stage.end.listen()
        assert not ack.died
        assert set(stage.end.workers) == {1}
        assert time.monotonic() - before < 3.0


def test_an_answer_that_is_said_once_more_takes_the_place_of_no_newer_one(stage: Stage) -> None:
    """One thread of a worker may repeat it while another one answers what has come since."""
    with stage.end._lock:
        for version in (1, 2):
            stage.publish(version, 0)
            stage.answer(0, version)
            assert stage.end._lines.read(deadline_in(10.0))
        stage.answer(0, 1)
        assert stage.end._lines.read(deadline_in(10.0))
        assert [ack.version for ack in stage.end.collect([0], 2, deadline_in(10.0))] == [2]


class Looks:
    """How often the courier has begun to wait; ``first`` and ``many`` are set by the first and the fiftieth."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.first = threading.Event()
        self.many = threading.Event()
        monkeypatch.setattr("wsync.network.courier.wait_readable", self._look)

    def _look(self, descriptors: Any, deadline: float | None) -> Any:
        self.count += 1
        self.first.set()
        if self.count == 50:
            self.many.set()
        return wait_readable(descriptors, deadline)


def test_the_courier_hears_who_comes_while_it_waits(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    courier = Looks(monkeypatch)
    stage.lines.pop(1).close()
    stage.end.forget(1)
    stage.publish(1, 0)
    stage.publish(2, 0)  # waits behind 1, and the courier for worker 0
    assert courier.first.wait(10.0)
    stage.join(1)
    stage.publish(3, 1)
    stage.publish(4, 1)
    stage.expect(1, Kind.NEWS, 3)
    stage.answer(1, 3)
    stage.expect(1, Kind.NEWS, 4)  # though the trainer does nothing


class Struck(BaseException):
    """What a handler of a signal raises."""


def strike(*_: Any) -> None:
    raise Struck


def test_an_answer_that_a_signal_took_away_is_asked_for(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.publish(1, 0)
    stage.expect(0, Kind.NEWS, 1)
    stage.answer(0, 1)
    assert wait_readable(stage.end._lines.signs, deadline_in(10.0))
    with monkeypatch.context() as patch, pytest.raises(Struck):
        patch.setattr(stage.end, "answered", strike)
        stage.end.listen()
    stage.publish(2, 0)
    stage.expect(0, Kind.ASK)
    stage.answer(0, 1)
    stage.expect(0, Kind.NEWS, 2)


def test_a_courier_that_a_signal_kept_from_starting_is_started_later(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.publish(1, 0)
    with monkeypatch.context() as patch, pytest.raises(Struck):
        patch.setattr(threading.Thread, "start", strike)
        stage.publish(2, 0)
    stage.expect(0, Kind.NEWS, 1)
    stage.publish(3, 0)
    stage.answer(0, 1)
    stage.expect(0, Kind.NEWS, 3)


def test_a_courier_that_was_never_started_is_not_waited_for(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.publish(1, 0)
    with monkeypatch.context() as patch, pytest.raises(Struck):
        patch.setattr(threading.Thread, "start", strike)
        stage.publish(2, 0)
    stage.end.close()


def test_a_worker_that_dies_before_its_pair_is_formed_is_waited_for_no_more() -> None:
    place, door = MeetingPlace("127.0.0.1", "gloo"), NetListener("127.0.0.1")
    end = GroupSender(1, door, place)
    line = dial(door.endpoint, 0, None)
    with ThreadPoolExecutor(1) as trainer:
        admitting = trainer.submit(end.admit, [0], {}, None)
        message = line.receive()
        assert message is not None and message.kind is Kind.WELCOME
        line.close()
        admitting.result(10.0)
    (ack,) = end.collect([0], 1, deadline_in(10.0))
    assert ack.died and not end.workers
    left = [thread for thread in threading.enumerate() if thread.name == "wsync-forming"]
    end.close()
    for thread in left:
        thread.join(10.0)
        assert not thread.is_alive(), "nobody is to come any more"


def test_a_forked_child_that_hangs_up_keeps_no_courier_busy(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    child = os.fork()
    if child == 0:
        stage.end.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    courier = Looks(monkeypatch)
    stage.publish(1, 0)
    stage.publish(2, 0)
    assert not courier.many.wait(0.5)
    stage.expect(0, Kind.NEWS, 1)
    stage.answer(0, 1)
    stage.expect(0, Kind.NEWS, 2)
