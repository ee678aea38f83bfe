"""A line of tensors through memory that a trainer and a worker on its machine share."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wsync.network.pair import Work
from wsync.network.same_host import HostIncoming, HostMemory, HostOutgoing

SIZES = st.integers(1, 3 * os.sysconf("SC_PAGESIZE"))


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    memory = HostMemory(3)
    yield memory
    memory.close()


def line_to(memory: HostMemory, worker: int, generation: int = 1) -> tuple[HostOutgoing, HostIncoming]:
    descriptor = memory.whereabouts.open()
    assert descriptor is not None
    return (
        HostOutgoing(memory, worker, generation),
        HostIncoming(memory.whereabouts, descriptor, worker, generation),
    )


def send(line: HostOutgoing, flat: torch.Tensor) -> None:
    works: list[Work] = []
    line.send(flat, works)
    assert len(works) == 1 and works[0].wait()


def begun(line: HostIncoming, flat: torch.Tensor) -> Work:
    works: list[Work] = []
    line.receive(flat, works)
    (work,) = works
    return work


@given(nbytes=SIZES, workers=st.integers(1, 600), updates=st.lists(st.tuples(st.integers(0, 599), st.integers(0, 3))))
def test_each_worker_takes_what_it_was_pointed_to(nbytes: int, workers: int, updates: list[tuple[int, int]]) -> None:
    memory = HostMemory(workers)
    slots = [memory.room(nbytes) for _ in range(4)]
    lines: dict[int, tuple[HostOutgoing, HostIncoming]] = {}
    target = torch.zeros(nbytes, dtype=torch.uint8)
    for count, (number, slot) in enumerate(updates):
        worker = number % workers
        if worker not in lines:
            lines[worker] = line_to(memory, worker)
        outgoing, incoming = lines[worker]
        work = begun(incoming, target)
        send(outgoing, slots[slot].fill_(count % 251))
        work.wait()
        assert target.eq(count % 251).all()
    for outgoing, incoming in lines.values():
        outgoing.close()
        incoming.close()
    memory.close()


def test_a_worker_sees_that_it_is_pointed_to_something_that_it_has_not_taken(memory: HostMemory) -> None:
    flats = [memory.room(64).fill_(number) for number in range(2)]
    target = torch.zeros(64, dtype=torch.uint8)
    outgoing, incoming = line_to(memory, 1)
    _, neighbour = line_to(memory, 2)
    assert not incoming.pointed()
    for flat in (*flats, *flats):
        send(outgoing, flat)
        assert incoming.pointed() and incoming.pointed() and not neighbour.pointed()
        begun(incoming, target).wait()
        assert target.equal(flat) and not incoming.pointed()
    send(outgoing, flats[0])
    outgoing.close()
    assert not incoming.pointed(), "it was given up"
    send(line_to(memory, 1, generation=2)[0], flats[1])
    assert not incoming.pointed(), "somebody else is in its place"
    for line in (incoming, neighbour):
        line.close()
    assert not incoming.pointed()


def test_a_worker_that_is_given_up_while_it_copies_has_taken_nothing(
    memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat, target = memory.room(8192).fill_(1), torch.zeros(8192, dtype=torch.uint8)
    outgoing, incoming = line_to(memory, 2)
    real: Any = incoming._slot

    def slowly(slot: int, nbytes: int) -> Any:
        content = real(slot, nbytes)
        outgoing.close()  # it was stopped, and nobody waited any longer
        flat[4096:].fill_(2)
        return content

    send(outgoing, flat)
    monkeypatch.setattr(incoming, "_slot", slowly)
    with pytest.raises(RuntimeError, match="given worker 2 up"):
        begun(incoming, target).wait()
    assert set(target.tolist()) == {1, 2}, "this would have been torn"
    with pytest.raises(RuntimeError, match="given worker 2 up"):
        begun(incoming, target).wait()
    incoming.close()


def test_one_in_the_place_of_another_disturbs_neither_end_of_its_line(memory: HostMemory) -> None:
    flat, target = memory.room(64).fill_(3), torch.zeros(64, dtype=torch.uint8)
    old, stopped = line_to(memory, 0, generation=1)
    new, incoming = line_to(memory, 0, generation=2)
    send(new, flat)
    old.close()  # late
    begun(incoming, target).wait()
    assert target.eq(3).all()
    with pytest.raises(RuntimeError, match="given worker 0 up"):
        begun(stopped, target).wait()
    for line in (stopped, incoming):
        line.close()


def test_a_forked_child_revokes_nothing(memory: HostMemory) -> None:
    flat, target = memory.room(64).fill_(5), torch.zeros(64, dtype=torch.uint8)
    outgoing, incoming = line_to(memory, 0)
    send(outgoing, flat)
    child = os.fork()
    if child == 0:
        outgoing.close()
        memory.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    begun(incoming, target).wait()
    assert target.eq(5).all()
    incoming.close()


def test_a_worker_cannot_write_into_the_trainers_memory(memory: HostMemory) -> None:
    descriptor = memory.whereabouts.open()
    assert descriptor is not None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(descriptor, b"x", 0)
    os.close(descriptor)


def test_what_is_somewhere_else_is_not_opened(memory: HostMemory) -> None:
    there = memory.whereabouts
    other = HostMemory(1)
    mine, theirs = os.pipe()
    for elsewhere in (
        replace(there, name="wsync-0"),
        replace(there, descriptor=other.whereabouts.descriptor),
        replace(there, descriptor=mine),  # to open it would wait for somebody who writes
        replace(there, descriptor=1 << 20),
        replace(there, pid=1 << 22),
    ):
        assert elsewhere.open() is None
    other.close()
    os.close(mine)
    os.close(theirs)
    memory.close()
    assert there.open() is None


def test_another_users_process_is_not_looked_into(memory: HostMemory) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to be somebody else")
    code = f"import os; os.setuid(65534); os.readlink('/proc/{os.getpid()}/fd/{memory.whereabouts.descriptor}')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "PermissionError" in done.stderr


def test_no_two_slots_lie_in_one_place_though_one_was_lost_as_it_was_made(memory: HostMemory) -> None:
    """A signal has struck before anybody had it, and the next one may well lie at its address."""
    memory.room(64)
    slots = [memory.room(64).fill_(number) for number in range(1, 6)]
    assert [int(slot[0]) for slot in slots] == [1, 2, 3, 4, 5]


def held(name: str) -> int:
    """How many descriptors of a memory this process has."""
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            count += name in os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # that by which the folder was read
            continue
    return count


def test_what_nobody_has_closed_is_let_go_with_who_had_it() -> None:
    """A signal may strike as a line is handed over; and one may be formed just as nobody waits for it any longer."""
    memory = HostMemory(1)
    name = memory.whereabouts.name
    flat = memory.room(64)
    outgoing, incoming = line_to(memory, 0)
    send(outgoing, flat)
    begun(incoming, torch.zeros(64, dtype=torch.uint8)).wait()
    assert held(name) == 5  # at either end the file, and the slot in it; in the worker its word
    del incoming
    gc.collect()
    assert held(name) == 2
    del memory, outgoing, flat
    gc.collect()
    assert held(name) == 0


def test_what_cannot_be_mapped_cannot_be_taken(memory: HostMemory) -> None:
    outgoing, incoming = line_to(memory, 0)
    send(outgoing, memory.room(64))
    work, limits = begun(incoming, torch.zeros(64, dtype=torch.uint8)), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(RuntimeError, match="worker 0 cannot map the trainer's memory"):
            work.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    work.wait()
    incoming.close()
