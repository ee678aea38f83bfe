"""Gathering and updating exclude each other, and neither starves the other."""

from __future__ import annotations

import gc
import os
import select
import statistics
import threading
import time
from collections.abc import Iterator

import pytest
from striking import struck_at

from collectors.workers.gather_lock import GatherLock

PATIENCE = 5.0  # seconds


@pytest.fixture
def lock() -> Iterator[GatherLock]:
    made = GatherLock()
    yield made
    made.wakeup.close()


def test_the_descriptor_is_closed_with_a_lock_that_was_not_closed() -> None:
    lock = GatherLock()
    descriptor = lock.wakeup.fileno()
    os.fstat(descriptor)
    del lock
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize("method", ["set", "clear", "close"])
def test_a_signal_handler_may_wake_within_every_call(method: str) -> None:
    ended, point = False, 0
    while not ended:
        point += 1
        wakeup = GatherLock().wakeup
        number = wakeup.fileno()
        ended = struck_at(point, getattr(wakeup, method), wakeup.set)
        wakeup.close()
        other = os.eventfd(0, os.EFD_NONBLOCK)
        assert other == number
        wakeup.set()  # without effect
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other)
        os.close(other)
    assert point > 2


def wait_in(lock: GatherLock) -> bool:
    """Wait as a gathering thread does; return whether it was woken."""
    woken = bool(select.select([lock.wakeup], [], [], PATIENCE)[0])
    lock.wakeup.clear()
    return woken


def test_an_update_interrupts_a_gathering_thread_that_waits(lock: GatherLock) -> None:
    inside, over = [0], threading.Event()
    woken: list[bool] = []

    def gather() -> None:
        while not over.is_set():
            with lock.gathering():
                inside[0] += 1
                woken.append(wait_in(lock))
                inside[0] -= 1

    gathering = threading.Thread(target=gather)
    gathering.start()
    for _ in range(3_000):
        with lock.updating():
            assert inside[0] == 0
    over.set()
    lock.wakeup.set()
    gathering.join()
    assert all(woken)


def test_threads_that_ask_again_at_once_stand_behind_those_that_wait(lock: GatherLock) -> None:
    over, entered = threading.Event(), threading.Event()
    updates = [0]

    def update() -> None:
        while not over.is_set():
            with lock.updating():
                updates[0] += 1
                entered.set()
                until = time.monotonic() + 0.001
                while time.monotonic() < until:  # keeps the interpreter lock, as work in Python does
                    pass

    updating = threading.Thread(target=update)
    updating.start()
    assert entered.wait(PATIENCE)
    passed = []
    for _ in range(50):
        before = updates[0]
        with lock.gathering():
            passed.append(updates[0] - before)
    over.set()
    updating.join()
    # One update may hold the lock and one may have asked before; a thread that is not scheduled has not asked yet.
    assert statistics.median(passed) <= 2


@pytest.mark.parametrize("inner", ["gathering", "updating"])
@pytest.mark.parametrize("outer", ["gathering", "updating"])
def test_the_lock_is_re_entrant(lock: GatherLock, outer: str, inner: str) -> None:
    done = []

    def nest() -> None:
        with getattr(lock, outer)(), getattr(lock, inner)():
            done.append(outer)
        with lock.gathering():
            done.append(inner)

    thread = threading.Thread(target=nest, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert done == [outer, inner]


def test_the_lock_excludes(lock: GatherLock) -> None:
    inside: list[str] = []

    def work(kind: str) -> None:
        for _ in range(500):
            with getattr(lock, kind)():
                inside.append(kind)
                assert inside == [kind]
                inside.clear()

    threads = [threading.Thread(target=work, args=[kind]) for kind in ("gathering", "updating", "updating")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not inside


def test_the_end_wakes_the_owner_and_does_not_wait_for_it_for_ever(lock: GatherLock) -> None:
    held, release = threading.Event(), threading.Event()

    def own() -> None:
        with lock.gathering():
            held.set()
            release.wait(PATIENCE)

    thread = threading.Thread(target=own)
    thread.start()
    assert held.wait(PATIENCE)
    with lock.ending(0.01):
        assert wait_in(lock) and thread.is_alive()
    release.set()
    thread.join(PATIENCE)
    with lock.ending(PATIENCE), lock.gathering():  # re-entrant
        pass
