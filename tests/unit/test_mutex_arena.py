"""The robust mutex outlives its owner; an arena's words name the slots in use."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from implementations import KINDS, choose, implementation, new_arena

from wsync import SyncTimeout
from wsync.loops.arena_writer import ArenaWriter
from wsync.loops.mutex import Mutex
from wsync.loops.worker_slot import WorkerSlot
from wsync.shm.arena import Arena
from wsync.weights.layout import Layout
from wsync.weights.snapshot import Snapshot


def test_mutex_of_a_dead_owner_is_free() -> None:
    memory = mmap.mmap(-1, 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    lock = Mutex(address, memory)
    lock.initialise()
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


class Watched:
    """A worker's words; after every store to them the sender looks."""

    def __init__(self, words: Any, look: Any) -> None:
        self.words, self.look = words, look

    def __getitem__(self, index: int) -> int:
        return self.words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self.words[index] = value
        self.look()


@pytest.mark.parametrize("keep_published", [True, False])
def test_a_needed_slot_is_occupied_at_every_moment(keep_published: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(implementation("Python"), monkeypatch.setattr)
    arena = new_arena(Layout.of(Snapshot({"a": torch.zeros(4)})), 1)
    try:
        for _ in range(4):
            arena.grow()
        writer, slot, needed = arena.writer, WorkerSlot(), set[int]()
        assert isinstance(writer, ArenaWriter)

        def look() -> None:
            assert needed <= set().union(*writer.occupied((0,) if keep_published else ()))

        slot.map_words(arena.words, arena.first_word_of(0))
        block: Any = slot._block
        block.words = Watched(block.words, look)
        writer.publish(0, 1, 1, False, 1.0)
        needed = {1}
        assert slot.take(True) == (1, 1, False)
        slot.version = slot.slot = 1
        slot.hold = True
        writer.publish(0, 2, 2, False, 1.0)
        slot.release()  # a model that stays on it
        needed = {1, 2}
        assert slot.take(True) == (2, 2, False)
        slot.version = slot.slot = 2
        writer.publish(0, 3, 3, False, 1.0)
        needed = {2, 3}  # version 2 was installed, and version 3 may be refused
        slot.release()
    finally:
        arena.close()


def test_two_threads_map_each_slot_once() -> None:
    layout = Layout.of(Snapshot({str(i): torch.zeros(4) for i in range(200)}))
    ours = new_arena(layout, 1)
    slots = [ours.grow() for _ in range(8)]
    for slot in slots:
        ours.buffer(slot).flat.fill_(slot)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            theirs, begin = new_arena(layout, 1, (os.dup(ours.fds[0]), os.dup(ours.fds[1]))), threading.Barrier(2)

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
from wsync.shm.arena import Arena
from wsync.weights.layout import Layout
from wsync.weights.snapshot import Snapshot

def grow():
    threading.main_thread().join()
    with suppress(RuntimeError):
        while True:  # until the interpreter has come so far that it takes no more
            executor.submit(int)
    print(arena.grow())

executor, arena = ThreadPoolExecutor(1), Arena(1)
arena.set_layout(Layout.of(Snapshot({"a": torch.zeros(4)})))
threading.Thread(target=grow).start()
"""


def test_a_thread_that_outlives_the_main_thread_maps_slots_as_before() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROW_AFTER_MAIN], capture_output=True, text=True, check=False, timeout=50
    )
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_words_name_the_slots_in_use(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    classes = implementation(kind)
    choose(classes, monkeypatch.setattr)
    arena = new_arena(Layout.of(Snapshot({"a": torch.zeros(4)})), 2)
    try:
        assert [arena.grow() for _ in range(3)] == [0, 1, 2]
        writer, slot = arena.writer, classes.WorkerSlot()
        slot.map_words(arena.words, arena.first_word_of(0))
        assert writer.published(0) == (0, 0) and writer.occupied((0, 1)) == (set(), set(), set())
        writer.publish(0, 1, 2, False, 1.0)
        assert writer.occupied(()) == ({2}, set(), set())
        assert slot.take(False) == (1, 2, False)
        slot.version, slot.slot = 1, 2
        assert writer.occupied((0, 1)) == ({2}, {2}, set()) and writer.occupied(()) == (set(), {2}, set())
        assert writer.await_free(0, 1.0)
        writer.publish(0, 2, 0, True, 1.0)
        assert writer.occupied((0, 1)) == ({0}, {2}, set())  # the forward that runs keeps its slot
        assert slot.release()
        assert slot.take(True) == (2, 0, True)
        assert writer.occupied((0, 1)) == ({0}, {0}, {2})
        assert not slot.release()
        writer.vacate(0, 1.0)
        assert writer.occupied(()) == ({0}, set(), set())  # its successor has taken nothing
        assert writer.published(1) == (0, 0)
        arena.write_extra(1, b"blob")
        assert (arena.read_extra(0), arena.read_extra(1)) == (b"", b"blob")
    finally:
        arena.close()
