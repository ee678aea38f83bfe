"""The robust mutex outlives its owner; an arena's switch names what is used."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from striking import struck_at

from wsync import SyncTimeout
from wsync.local import mutex
from wsync.local.arena import Arena
from wsync.local.mutex import Mutex
from wsync.weights.layout import Layout
from wsync.weights.snapshot import Snapshot


def test_mutex_of_a_dead_owner_is_free() -> None:
    memory = mmap.mmap(-1, 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    mutex.initialise(address)
    lock = Mutex(address, memory)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        lock.lock()
        os.write(tell, b"x")
        signal.pause()
    os.read(told, 1)
    with pytest.raises(SyncTimeout):
        lock.lock(0.05)
    lock.unlock()  # not ours: refused without harm
    with pytest.raises(SyncTimeout):
        lock.lock(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for _ in range(3):
        lock.lock(1.0)
        lock.unlock()
    os.close(told)
    os.close(tell)


@pytest.mark.parametrize("step", ["publish", "await_free", "enter", "leave", "call", "vacate"])
def test_a_signal_that_strikes_leaves_no_switch_locked(step: str) -> None:
    arena = Arena(Layout.of(Snapshot({"a": torch.zeros(4)})), 1)
    switch = arena.switches[0]
    steps: dict[str, Callable[[], object]] = {
        "publish": partial(switch.publish, 1, 0, False, 1.0),
        "await_free": partial(switch.await_free, 1.0),
        "enter": partial(switch.enter, 0, -1, False),
        "leave": switch.leave,
        "call": partial(switch.call, True),
        "vacate": partial(switch.vacate, 1.0),
    }

    def publish_elsewhere() -> None:
        switch.publish(1, 0, False, 0.0)
        published.append(point)

    published = list[int]()
    for point in count(1):
        finished = struck_at(point, steps[step])
        other = threading.Thread(target=publish_elsewhere)
        other.start()
        other.join()
        assert published[-1:] == [point], f"struck at point {point}, it is still locked"
        if finished:
            break
    assert len(published) > 2
    arena.close()


class Watched:
    """A worker's words; after every store to them the sender looks."""

    def __init__(self, words: Any, look: Any) -> None:
        self.words, self.look = words, look

    def __getitem__(self, index: int) -> int:
        return self.words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self.words[index] = value
        self.look()


@pytest.mark.parametrize("retains", [True, False])
def test_a_needed_slot_is_occupied_at_every_moment(retains: bool) -> None:
    arena = Arena(Layout.of(Snapshot({"a": torch.zeros(4)})), 1)
    try:
        for _ in range(4):
            arena.grow()
        switch, needed = arena.switches[0], set[int]()

        def look() -> None:
            assert needed <= set().union(*arena.occupied((0,) if retains else ()))

        switch._words = Watched(switch._words, look)  # pyright: ignore[reportAttributeAccessIssue]
        switch.publish(1, 1, False, 1.0)
        needed = {1}
        assert switch.enter(0, -1, True) == (1, 1, False)
        switch.publish(2, 2, False, 1.0)
        switch.leave(1)  # a model that stays on it
        needed = {1, 2}
        assert switch.enter(1, 1, True) == (2, 2, False)
        switch.publish(3, 3, False, 1.0)
        needed = {2, 3}  # version 2 was installed, and version 3 may be refused
        switch.leave(2)
    finally:
        arena.close()


def test_two_threads_map_each_slot_once() -> None:
    layout = Layout.of(Snapshot({str(i): torch.zeros(4) for i in range(200)}))
    ours = Arena(layout, 1)
    slots = [ours.grow() for _ in range(8)]
    for slot in slots:
        ours.buffer(slot).flat.fill_(slot)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            theirs, begin = Arena(layout, 1, (os.dup(ours.fds[0]), os.dup(ours.fds[1]))), threading.Barrier(2)

            def map_all(arena: Arena = theirs, begin: threading.Barrier = begin) -> None:
                begin.wait()
                for slot in slots:
                    arena.views(slot)

            threads = [threading.Thread(target=map_all) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert [buffer.flat[0].item() for buffer in map(theirs.buffer, slots)] == slots
            theirs.close()
    finally:
        sys.setswitchinterval(interval)
        ours.close()


GROW_AFTER_MAIN = """
import threading, torch
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from wsync.local.arena import Arena
from wsync.weights.layout import Layout
from wsync.weights.snapshot import Snapshot

def grow():
    threading.main_thread().join()
    with suppress(RuntimeError):
        while True:  # until the interpreter has come so far that it takes no more
            executor.submit(int)
    print(arena.grow())

executor, arena = ThreadPoolExecutor(1), Arena(Layout.of(Snapshot({"a": torch.zeros(4)})), 1)
threading.Thread(target=grow).start()
"""


def test_a_thread_that_outlives_the_main_thread_maps_slots_as_before() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROW_AFTER_MAIN], capture_output=True, text=True, check=False, timeout=50
    )
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


def test_switch_names_what_is_used() -> None:
    arena = Arena(Layout.of(Snapshot({"a": torch.zeros(4)})), 2)
    try:
        assert arena.free_slot(()) is None
        assert [arena.grow() for _ in range(3)] == [0, 1, 2]
        switch = arena.switches[0]
        assert switch.published() == (0, 0) and arena.occupied((0, 1)) == (set(), set(), set())
        switch.publish(1, 2, False, 1.0)
        assert arena.occupied(()) == ({2}, set(), set())
        assert switch.enter(0, -1, False) == (1, 2, False)
        assert arena.occupied((0, 1)) == ({2}, {2}, set()) and arena.occupied(()) == (set(), {2}, set())
        assert switch.await_free(1.0)
        switch.publish(2, 0, True, 1.0)
        assert arena.occupied((0, 1)) == ({0}, {2}, set())  # the forward that runs keeps its slot
        assert switch.leave()
        assert switch.enter(1, 2, True) == (2, 0, True)
        assert arena.occupied((0, 1)) == ({0}, {0}, {2})
        assert not switch.leave()
        switch.vacate(1.0)
        assert arena.occupied(()) == ({0}, set(), set())  # who comes in its place has taken nothing
        assert arena.switches[1].published() == (0, 0)
        arena.write_extra(1, b"blob")
        assert (arena.read_extra(0), arena.read_extra(1)) == (b"", b"blob")
    finally:
        arena.close()
