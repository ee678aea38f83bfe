"""Forked processes as workers, and children of both ends that end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from backends import BuiltIn

import wsync
from wsync.testing import Worker, WorkerPool, commands
from wsync.testing.commands import WorkerState
from wsync.testing.models import EveryTensorKind, digest, scramble


class ForkedPool(WorkerPool):
    """Workers that are forked from the test's process."""

    def start_workers(self, count: int) -> list[Worker]:
        return [Worker("fork") for _ in range(count)]


def test_forked_workers(backend: BuiltIn) -> None:
    pool = ForkedPool()
    with pool.group(2) as workers, backend.make_scheme(timeout=30.0) as scheme:
        model = scramble(EveryTensorKind(), 1)
        scheme.init_on_sender("policy", model=model, num_workers=2)
        for index, worker in enumerate(workers):
            worker.start(commands.join, scheme, EveryTensorKind, index, "policy")
        scheme.connect()
        workers.results()
        assert workers.call(commands.digest) == [digest(model)] * 2
        scheme.send(scramble(model, 2))
        assert workers.call(commands.digest) == [digest(model)] * 2
        assert workers.call(commands.shutdown) == [[], []]
    pool.close()


@contextmanager
def forked(function: Callable[[], Any] = lambda: None) -> Iterator[None]:
    """A forked child that has called ``function``, and lives."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        function()
        os.write(writing, b".")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(reading, 1) == b"."
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def test_a_childs_shutdown_ends_no_connection_of_the_trainer_and_the_trainers_ends_all(backend: BuiltIn) -> None:
    with backend.connected(1) as session, forked(session.scheme.shutdown):
        session.send(2)
        assert session.workers[0].call(commands.receive, 20.0)
        with forked():
            session.workers[0].start(commands.receive, 20.0)
            session.scheme.shutdown()
            assert session.workers[0].result() is None


def shut_down_in_child(state: WorkerState) -> None:
    """Fork a child inside the gate, which shuts its copies of the schemes down."""
    with wsync.gate():
        child = os.fork()
        if child == 0:
            commands.shutdown(state)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def test_a_childs_shutdown_does_not_disconnect_its_parent(backend: BuiltIn) -> None:
    with backend.connected(1) as session:
        session.workers[0].call(shut_down_in_child)
        for value in range(2, 6):
            session.send(value)
            assert session.outputs() == [value]
