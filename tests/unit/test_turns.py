"""Who gathers and who brings weights take turns, whatever the order in which they come."""

from __future__ import annotations

import gc
import os
import select
import threading
import time
from collections.abc import Iterator

import pytest

from collectors.workers.turns import Turns

pytestmark = pytest.mark.timeout(60)
PATIENCE = 5.0  # seconds


@pytest.fixture
def turns() -> Iterator[Turns]:
    made = Turns()
    yield made
    made.close()


def test_a_descriptor_that_nobody_closes_goes_with_its_owner() -> None:
    turns = Turns()
    os.close(turns.wake)
    reader, turns.wake = os.pipe()  # whose end can be seen
    del turns
    gc.collect()
    assert select.select([reader], [], [], PATIENCE)[0] and os.read(reader, 1) == b""
    os.close(reader)


def wait_in(turns: Turns) -> bool:
    """Wait as one does who gathers; whether one was called."""
    called = bool(select.select([turns.wake], [], [], PATIENCE)[0])
    turns.come()
    return called


def test_a_guest_is_let_in_while_somebody_waits_and_finds_nobody_there(turns: Turns) -> None:
    inside, slowest, over = [0], [0.0], threading.Event()

    def gather() -> None:
        while not over.is_set():
            with turns.gathering():
                inside[0] += 1
                wait_in(turns)
                inside[0] -= 1

    gathering = threading.Thread(target=gather)
    gathering.start()
    for _ in range(3_000):
        came = time.monotonic()
        with turns.visiting():
            assert inside[0] == 0
        slowest[0] = max(slowest[0], time.monotonic() - came)
    over.set()
    turns.call()
    gathering.join()
    assert slowest[0] < PATIENCE / 2


def test_guests_who_come_all_the_time_keep_nobody_out(turns: Turns) -> None:
    over = threading.Event()

    def visit() -> None:
        while not over.is_set():
            with turns.visiting():
                until = time.monotonic() + 0.001
                while time.monotonic() < until:
                    pass

    visiting = threading.Thread(target=visit)
    visiting.start()
    came = time.monotonic()
    for _ in range(100):
        with turns.gathering():
            pass
    took = time.monotonic() - came
    over.set()
    visiting.join()
    assert took < PATIENCE


@pytest.mark.parametrize("inner", ["gathering", "visiting"])
@pytest.mark.parametrize("outer", ["gathering", "visiting"])
def test_who_has_it_may_take_it_again(turns: Turns, outer: str, inner: str) -> None:
    done = []

    def nest() -> None:
        with getattr(turns, outer)(), getattr(turns, inner)():
            done.append(outer)
        with turns.gathering():
            done.append(inner)

    thread = threading.Thread(target=nest, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert done == [outer, inner]


def test_one_at_a_time(turns: Turns) -> None:
    inside: list[str] = []

    def work(kind: str) -> None:
        for _ in range(500):
            with getattr(turns, kind)():
                inside.append(kind)
                assert inside == [kind]
                inside.clear()

    threads = [threading.Thread(target=work, args=[kind]) for kind in ("gathering", "visiting", "visiting")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not inside
