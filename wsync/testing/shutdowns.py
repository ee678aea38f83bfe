"""The contract, part 6: a scheme takes away what it has made, at its end and at the end of its worker."""

from __future__ import annotations

import gc
import os
import re
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import wsync.testing.commands as commands
from wsync.testing.commands import WorkerState
from wsync.testing.hooks import TIMEOUT, BackendHooks
from wsync.testing.models import Small
from wsync.testing.session import Session, connect_all
from wsync.testing.workers import WorkerError

ROUNDS = 3
GROWTH = 8 << 20
"""Bytes by which the resident memory may grow in ``ROUNDS`` rounds: an allocator keeps some."""
_STILL_OPEN = "shutdown() has left something of the trainer's end open or running"


def resources() -> dict[str, Any]:
    """What this process has that a scheme may have made: threads, descriptors, child processes, wsync's mappings."""
    gc.collect()  # a memory map keeps a descriptor until it is collected
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": _descriptors(),
        "children": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        "mappings": sum("wsync" in line for line in Path("/proc/self/maps").read_text().splitlines()),
    }


def _descriptors() -> Counter[str]:
    """The number of open descriptors of each kind (``socket:[]``, ``pipe:[]``, a path), without numbers in its name."""
    found = Counter[str]()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found[re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{name}"))] += 1
    return found


def shared_memory_files() -> set[str]:
    """The names in /dev/shm that contain ``wsync``, or this process's id as torch puts it there."""
    names = os.listdir("/dev/shm")  # other programs of the machine, such as Ray, have files there
    return {name for name in names if "wsync" in name or name.startswith(f"torch_{os.getpid()}_")}


def resident_bytes() -> int:
    """Return the resident memory of this process, shared memory included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _resources(state: WorkerState) -> dict[str, Any]:
    state.clear()
    return resources()


def _shut_down_while_receiving(state: WorkerState) -> list[object]:
    """Shut down while another thread waits in ``receive``; returns what it returned there."""
    scheme, waiting, returned = state.schemes["policy"], threading.Event(), list[object]()

    def wait() -> None:
        waiting.set()
        returned.append(scheme.receive())

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    scheme.shutdown()
    thread.join(TIMEOUT)
    assert not thread.is_alive(), "receive() still waits"
    return returned


class Shutdowns(BackendHooks):
    """What is left."""

    def trainer_resources(self) -> dict[str, Any]:
        """``resources`` of the trainer's process; a backend with libraries that come and go leaves theirs out."""
        return resources()

    def _round(self, session_count: int = 2) -> list[dict[str, Any]]:
        with self.connected(session_count) as session:
            for value in (2, 3):
                session.send(value)
                assert session.outputs() == [value] * session_count
            assert session.workers.call(commands.shutdown) == [[]] * session_count
            session.scheme.shutdown()
            session.scheme.shutdown()
            return session.workers.call(_resources)

    def _leaves_nothing(self, attempt: Callable[[], object], rounds: int = ROUNDS) -> None:
        """Check what further attempts leave: libraries keep what they have made in the first one."""
        attempt()
        before, files = self.trainer_resources(), shared_memory_files()
        for _ in range(rounds):
            attempt()
        after = self.trainer_resources()
        for name in ("children", "descriptors"):  # the pool starts workers when it needs them
            assert after.pop(name, Counter()) <= before.pop(name, Counter()), _STILL_OPEN
        assert after == before, _STILL_OPEN
        assert shared_memory_files() <= files

    def test_nothing_is_left_after_shutdown(self) -> None:
        inside = self._round()  # what libraries make once, they keep
        before, files, size = self.trainer_resources(), shared_memory_files(), resident_bytes()
        latest = [self._round() for _ in range(ROUNDS)][-1]
        assert self.trainer_resources() == before, _STILL_OPEN
        assert shared_memory_files() <= files
        assert sorted(map(str, latest)) == sorted(map(str, inside))
        assert resident_bytes() - size < GROWTH

    def test_a_scheme_that_is_dropped_without_shutdown_leaves_nothing(self) -> None:
        def attempt() -> None:
            with self.workers(2) as workers:
                scheme = self.make_scheme(timeout=TIMEOUT)
                scheme.init_on_sender("policy", model=Small(), num_workers=2)
                session = Session(scheme, workers, Small(), Small, "policy")
                connect_all(session, first_weights_at_connect=self.first_weights_at_connect)
                session.send(2)
                assert session.outputs() == [2, 2]
                del scheme, session
                gc.collect()
                assert workers.call(commands.shutdown) == [[]] * 2

        self._leaves_nothing(attempt)

    def test_nothing_is_left_of_killed_workers(self) -> None:
        def attempt() -> None:
            with self.connected() as session:
                session.workers[0].kill()
                session.restart(0)
                session.send(2)
                assert session.outputs() == [2, 2]
                session.workers[1].kill()

        self._leaves_nothing(attempt, rounds=1)

    def test_a_scheme_that_never_connected_leaves_nothing(self) -> None:
        def attempt() -> None:
            with self.make_scheme() as scheme:
                scheme.init_on_sender("policy", model=Small(), num_workers=2)

        self._leaves_nothing(attempt)

    def test_the_end_of_the_sender_ends_a_receive(self) -> None:
        with self.connected(1) as session:
            session.send(3)
            session.workers[0].start(commands.receive, None)
            session.scheme.shutdown()
            while session.workers[0].result() is not None:  # what was sent before may come first
                session.workers[0].start(commands.receive, None)
            assert session.workers[0].call(commands.finished)
            with pytest.raises(WorkerError) as again:
                session.workers[0].call(commands.receive, None)
            assert "NotConnected" in again.value.kinds
            assert session.outputs() == [3]
            assert session.workers[0].call(commands.shutdown) == []
            assert session.outputs() == [3]  # in memory of its own

    def test_shutdown_ends_a_receive_that_waits(self) -> None:
        with self.connected(1) as session:
            assert session.workers[0].call(_shut_down_while_receiving) == [None]
