"""The robust mutex outlives its owner; an arena's words name the slots in use."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
import torch
from implementations import KINDS, choose, implementation, new_arena, worker_arena

from wsync import SyncTimeout, WeightSyncError
from wsync.deadlines import deadline_in
from wsync.loops import mutex
from wsync.loops.arena_writer import ArenaWriter
from wsync.loops.mutex import Mutex
from wsync.loops.words import MAX_SLOTS, Block
from wsync.loops.worker_slot import WorkerSlot
from wsync.sending import slots
from wsync.shm import memory, registered
from wsync.shm.arena import SenderArena, WorkerArena
from wsync.types import Ack
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


def test_a_signal_while_a_dead_owners_mutex_is_taken_leaves_it_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    page = mmap.mmap(-1, 4096)
    lock = Mutex(ctypes.addressof(ctypes.c_char.from_buffer(page)), page)
    lock.initialise()
    child = os.fork()
    if child == 0:
        lock.lock()
        os._exit(0)
    os.waitpid(child, 0)
    trylock = mutex._trylock

    def interrupted(address: int) -> int:
        assert trylock(address) == errno.EOWNERDEAD
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mutex, "_trylock", interrupted)
        with pytest.raises(KeyboardInterrupt):
            try:
                lock.lock()
            finally:
                lock.unlock()
    lock.lock(1.0)
    lock.unlock()


def test_memory_is_allocated_in_short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may undo an allocation when a signal comes; with a periodic signal, a long one would never end."""
    sizes, allocate, pages = [], os.posix_fallocate, memory.whole_pages((5 << 20) + 1)

    def counted(descriptor: int, offset: int, size: int) -> None:
        sizes.append(size)
        if len(sizes) == 10:
            raise OSError(errno.ENOSPC, "full")
        allocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", counted)
    descriptor = memory.memory_file("test", pages)
    assert sum(sizes) == pages == os.fstat(descriptor).st_size and max(sizes) <= 1 << 20
    with pytest.raises(WeightSyncError, match="no shared memory left"):
        memory.allocate(descriptor, pages, pages)
    assert os.fstat(descriptor).st_size == pages, "what was allocated before is freed"
    os.close(descriptor)


class Watched:
    """A worker's words; after every store to them the sender looks."""

    def __init__(self, words: Any, look: Any) -> None:
        self.words, self.look = words, look

    def __getitem__(self, index: int) -> int:
        return self.words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self.words[index] = value
        self.look()


def test_a_needed_slot_is_occupied_at_every_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(implementation("Python"), monkeypatch.setattr)
    arena = new_arena(Layout.of(Snapshot({"a": torch.zeros(4)})), 1)
    try:
        for _ in range(4):
            arena.grow()
        writer, slot, needed = arena.writer, WorkerSlot(), set[int]()
        assert isinstance(writer, ArenaWriter)

        def look() -> None:
            assert needed <= set().union(*writer.occupied())

        slot.map_words(arena.words, 0, 1)
        slot.hold = True
        block: Any = slot._block
        block.words = Watched(block.words, look)
        writer.publish(0, 1, 1, False, 1.0)
        needed = {1}
        assert slot.take() == (1, 1, False)
        slot.version = slot.bound_slot = 1
        writer.publish(0, 2, 2, False, 1.0)
        slot.release()  # a model that stays on it
        needed = {1, 2}
        assert slot.take() == (2, 2, False)
        slot.version = slot.bound_slot = 2
        writer.publish(0, 3, 3, False, 1.0)
        needed = {2, 3}  # version 2 was installed, and version 3 may be refused
        slot.release()
    finally:
        arena.close()


class Recorded:
    """What ``Slots`` uses of the connections to workers: the answers that it stores itself."""

    def __init__(self) -> None:
        self.acks: list[Ack] = []

    def store(self, ack: Ack) -> None:
        self.acks.append(ack)


def test_a_worker_that_is_stopped_in_its_mutex_lacks_one_version_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_MUTEX_TIMEOUT", 0.05)
    connections: Any = Recorded()
    sender = slots.Slots(connections, 1, spare=0, checksum=None)
    sender.set_layout(Layout.of(Snapshot({"a": torch.zeros(4)})))
    sender.arena.writer.accept(0, 1)
    sender.workers.add(0)
    mutex = Block(sender.arena.words, 0).mutex
    with ThreadPool(1) as stopped:  # a thread may not lock the mutex twice
        stopped.apply(mutex.lock)
        sender.point(0, 6, 1, True)
        with pytest.raises(SyncTimeout, match=r"worker 0: .*is it stopped") as late:
            sender.reserve({0, 1}, deadline_in(0.05))
        stopped.apply(mutex.unlock)
    assert [(ack.worker, ack.version) for ack in connections.acks] == [(0, 6)]
    assert late.value.workers.keys() == {0}
    sender.arena.close()


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
            theirs, begin = worker_arena(ours), threading.Barrier(2)

            def map_all(arena: WorkerArena = theirs, begin: threading.Barrier = begin) -> None:
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
from wsync.shm.arena import SenderArena
from wsync.weights.layout import Layout
from wsync.weights.snapshot import Snapshot

def grow():
    threading.main_thread().join()
    with suppress(RuntimeError):
        while True:  # until the interpreter has come so far that it takes no more
            executor.submit(int)
    print(arena.grow())

executor, arena = ThreadPoolExecutor(1), SenderArena(1)
arena.set_layout(Layout.of(Snapshot({"a": torch.zeros(4)})))
threading.Thread(target=grow).start()
"""


def test_a_thread_that_outlives_the_main_thread_maps_slots_as_before() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROW_AFTER_MAIN], capture_output=True, text=True, check=False, timeout=250
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
        slot.map_words(arena.words, 0, 1)
        assert writer.published(0) == (0, 0) and writer.occupied() == (set(), set(), set())
        writer.publish(0, 1, 2, False, 1.0)
        assert writer.occupied() == ({2}, set(), set())
        assert slot.take() == (1, 2, False)
        slot.version, slot.bound_slot = 1, 2
        assert writer.occupied() == ({2}, {2}, set())
        assert writer.await_free(0, 1.0)
        writer.publish(0, 2, 0, True, 1.0)
        assert writer.occupied() == ({0}, {2}, set())  # the forward that runs keeps its slot
        assert slot.release()
        assert writer.occupied() == ({0}, set(), set())
        slot.hold = True
        assert slot.take() == (2, 0, True)
        assert writer.occupied() == ({0}, {0}, {2})
        assert not slot.release()
        writer.vacate(0, 1.0)
        assert writer.occupied() == ({0}, set(), set())  # for its replacement
        assert writer.published(1) == (0, 0)
        arena.write_extra(1, b"blob")
        assert (arena.read_extra(0), arena.read_extra(1)) == (b"", b"blob")
        with pytest.raises(IndexError):
            writer.set_slot_version(MAX_SLOTS, 1)
    finally:
        arena.close()


class Limited:
    """``os.pread`` and ``os.pwrite`` of a system that transfers a few bytes at once, as Linux does with 2 GiB."""

    def __init__(self) -> None:
        self.pread, self.pwrite = os.pread, os.pwrite

    def read(self, fd: int, count: int, offset: int) -> bytes:
        return self.pread(fd, min(count, 7), offset)

    def write(self, fd: int, data: bytes, offset: int) -> int:
        return self.pwrite(fd, data[:7], offset)


def test_extra_state_may_take_several_calls_to_store(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, limited, blob = SenderArena(1), Limited(), bytes(range(60))
    monkeypatch.setattr(os, "pread", limited.read)
    monkeypatch.setattr(os, "pwrite", limited.write)
    arena.write_extra(1, blob)
    assert arena.read_extra(1) == blob
    arena.close()


def test_extra_state_that_is_shorter_than_its_size_is_an_error() -> None:
    arena = SenderArena(1)
    arena.write_extra(0, b"blob")
    os.ftruncate(arena.fds[1], 3)
    with pytest.raises(ValueError, match="3 bytes of extra state, not 4"):
        arena.read_extra(0)
    arena.close()


def test_a_file_with_descriptor_0_is_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.zeros(8).share_memory_()
    arena, kept, opened = SenderArena(1), os.dup(0), list[int]()
    open_file = registered._open

    def note(mapping: Any) -> int | None:
        fd = open_file(mapping)
        opened.append(-1 if fd is None else fd)
        return fd

    monkeypatch.setattr(registered, "_open", note)
    os.close(0)
    try:
        buffers = registered.RegisteredWeights.create(arena, {"a": whole[:4], "b": whole[4:]})
        assert buffers is not None and opened == [0]
        buffers.close()
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        arena.close()
