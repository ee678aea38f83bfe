"""Other processes: forked workers and children, workers that a context lists, other connections."""

import gc
import multiprocessing
import os
import random
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from backends import BuiltIn
from listening import LOOPBACK, listening_tcp, own_sockets
from torch import nn

import wsync
from wsync.testing import Worker, WorkerPool, commands
from wsync.testing.commands import WorkerState
from wsync.testing.models import EveryTensorKind, Small, digest, fill, scramble


def be_trainer(state: WorkerState, scheme: wsync.WeightSyncScheme) -> wsync.WeightSyncScheme:
    scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=1)
    state.schemes["policy"] = scheme
    return scheme


def leave_a_child(state: WorkerState) -> int:
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        signal.pause()
    return child


def test_the_death_of_a_trainer_is_noticed_although_its_child_lives(backend: BuiltIn) -> None:
    with backend.workers(2) as workers:
        scheme = workers[1].call(be_trainer, backend.make_scheme(timeout=30.0))
        workers[0].start(commands.join, scheme, Small, 0, "policy")
        workers[1].call(commands.connect)
        workers[0].result()
        child = workers[1].call(leave_a_child)
        try:
            workers[0].start(commands.receive, 15.0)
            workers[1].kill()
            with pytest.raises(multiprocessing.ProcessError, match="NotConnected"):
                workers[0].result()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_listed_worker_that_dies_before_it_connects_is_named(backend: BuiltIn) -> None:
    with backend.workers(2) as workers, backend.make_scheme(timeout=60.0) as scheme:
        remote = [SimpleNamespace(worker_idx=i, sentinel=workers[i].sentinel) for i in range(2)]
        scheme.init_on_sender("policy", SimpleNamespace(policy=Small(), remote_workers=remote))
        workers[0].start(commands.join, scheme, Small, 0, "policy")
        workers[1].kill()
        with pytest.raises(wsync.WorkerDied, match="1") as died:
            scheme.connect()
        assert set(died.value.workers) == {1}


def init_and_shut_down(state: WorkerState, scheme: wsync.WeightSyncScheme) -> None:
    scheme.timeout = 0.5  # seconds that its connection, in the background, may take until the trainer accepts
    scheme.init_on_worker("policy", model=Small(), worker_idx=0)
    scheme.shutdown()


def test_a_worker_that_connected_and_left_is_not_waited_for(backend: BuiltIn) -> None:
    with backend.workers(2) as workers, backend.make_scheme(timeout=10.0) as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=1)
        workers[0].call(init_and_shut_down, scheme)
        workers[1].start(commands.join, scheme, Small, 0, "policy")
        scheme.connect()
        assert workers[1].result() == 1


def listening_sockets() -> set[tuple[int, int, Any]]:
    """The sockets on which this process listens: descriptor, family and address."""
    mine, found = own_sockets(), set[tuple[int, int, Any]]()
    for fd, address, port in listening_tcp():
        if len(address) == len(LOOPBACK):
            found.add((fd, socket.AF_INET, ("127.0.0.1", port)))
    for row in Path("/proc/net/unix").read_text().splitlines()[1:]:
        columns = row.split()
        fd = mine.get(f"socket:[{columns[6]}]")
        if len(columns) > 7 and int(columns[3], 16) & 0x10000 and fd is not None:
            found.add((fd, socket.AF_UNIX, columns[7].replace("@", "\0", 1)))
    return found


def open_connection(family: int, address: Any) -> socket.socket:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        connection = socket.socket(family, kind)
        try:
            connection.connect(address)
        except OSError:
            connection.close()
        else:
            return connection
    raise AssertionError(f"nothing listens on {address}")


def test_workers_connect_beside_connections_that_send_noise_or_nothing(backend: BuiltIn) -> None:
    noise = random.Random(5)
    contents = [b"", b"GET / HTTP/1.1\r\n\r\n", noise.randbytes(500), bytes(8) + b"\xff" * 8, b"\x00", b"\x10"]
    before = listening_sockets()
    with backend.workers(2) as workers, backend.make_scheme(timeout=30.0) as scheme:
        model = fill(Small(), 1)
        scheme.init_on_sender("policy", model=model, num_workers=2)
        opened = listening_sockets() - before
        assert opened
        others = [open_connection(family, address) for _, family, address in opened for _ in contents]
        for connection, content in zip(others, contents * len(opened), strict=True):
            if content:
                connection.send(content)
        for index, worker in enumerate(workers):
            worker.start(commands.join, scheme, Small, index, "policy")
        scheme.connect()
        assert workers.results() == [1, 1]
        for value in (2, 3):
            scheme.send(fill(model, value))
            assert [output[0] for output in workers.call(commands.output)] == [value] * 2
        for connection in others:
            connection.close()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"model": Small(), "num_workers": 2.0}, "whole number"),
        ({"model": Small(), "num_workers": "2"}, "whole number"),
        ({"model": Small(), "devices": "cpu"}, "one for each worker"),
        ({"model": "Small"}, r"weights are a torch\.nn\.Module"),
        ({"weights": 3}, r"weights are a torch\.nn\.Module"),
        ({"model": Small(), "device_map_fn": "cpu"}, "device_map_fn is a function"),
        ({"params_map": {0: Small()}, "device_map_fn": lambda worker, weights: weights}, "device_map_fn"),
        ({"params_map": {False: Small(), True: Small()}}, "workers 0 to 1"),
        ({"params_map": {"policy": Small()}}, "workers 0 to 0"),
    ],
)
def test_an_init_that_is_refused_has_no_effect(backend: BuiltIn, given: Any, problem: str) -> None:
    with backend.make_scheme() as scheme:
        gc.collect()  # closes what earlier tests have left
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises((TypeError, ValueError, AttributeError), match=problem):
            scheme.init_on_sender("policy", **given)
        assert len(os.listdir("/proc/self/fd")) == before
        with pytest.raises(RuntimeError):
            scheme.init_on_receiver("policy", model=Small())


class ForkedPool(WorkerPool):
    def start_workers(self, count: int) -> list[Worker]:
        return [Worker("fork") for _ in range(count)]


def test_forked_workers(backend: BuiltIn) -> None:
    type(backend).pool = pool = ForkedPool()
    with backend.connected(make=EveryTensorKind) as session:
        for seed in (1, 2):
            assert session.digests() == [digest(session.model)] * 2
            session.scheme.send(scramble(session.model, seed))
        assert session.digests() == [digest(session.model)] * 2
        assert session.workers.call(commands.shutdown) == [[], []]
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


WORKERS = 64


def follow(scheme: wsync.WeightSyncScheme, worker_idx: int, started: Event) -> None:
    """Be a worker: connect once all processes have started, and receive until the trainer shuts down."""
    scheme.init_on_receiver("policy", model=nn.Linear(2, 2), worker_idx=worker_idx)
    started.wait()
    scheme.connect()
    while scheme.receive() is not None:
        pass
    assert scheme.finished


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shared_mem", "multiprocess", "distributed"])
def test_sixty_four_workers_that_connect_at_once_all_get_every_update(backend: str) -> None:
    context = multiprocessing.get_context("forkserver")
    started = context.Event()
    scheme = wsync.WeightSyncScheme.from_backend(backend)
    scheme.init_on_sender("policy", model=nn.Linear(2, 2), num_workers=WORKERS)
    processes = [context.Process(target=follow, args=(scheme, worker, started)) for worker in range(WORKERS)]
    try:
        for process in processes:
            process.start()
        started.set()
        scheme.connect(processes=processes)
        report = scheme.send()
        assert report is not None and sorted(report.workers) == list(range(WORKERS))
    finally:
        scheme.shutdown()
        for process in processes:
            process.join()
    assert [process.exitcode for process in processes] == [0] * WORKERS
