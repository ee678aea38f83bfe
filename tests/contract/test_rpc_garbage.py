"""Garbage that a third process sends to an RPC port: what docs/security.md says that it does."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from listening import listening_tcp
from rpc_workers import Rpc, RpcWorkerPool

import wsync
from wsync.testing import commands
from wsync.testing.commands import WorkerState


@pytest.fixture
def rpc() -> Iterator[Rpc]:
    Rpc.pool = RpcWorkerPool()
    yield Rpc()
    Rpc.pool.close()


def ports(state: WorkerState | None = None) -> list[int]:
    """The TCP ports on which this process listens."""
    return [port for _, _, port in listening_tcp()]


def send_to(port: int, data: bytes, seconds: float = 0.5) -> None:
    """Send ``data`` from a process of its own, and wait until the other end has closed, or ``seconds``."""
    code = (
        "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5)\n"
        "s.settimeout(float(sys.argv[3]))\n"
        "s.send(bytes.fromhex(sys.argv[2]))\n"
        "try: s.recv(1)\nexcept OSError: pass"
    )
    status = os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code, str(port), data.hex(), str(seconds)])
    assert status == 0


GARBAGE = {
    "a request": b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_on_a_workers_port_is_a_death_that_names_the_worker(rpc: Rpc, garbage: str) -> None:
    with rpc.connected() as session:
        (port,) = session.workers[0].call(ports)
        send_to(port, GARBAGE[garbage], 60.0)  # it may take long to die on a machine with much to do
        with pytest.raises(wsync.WorkerDied, match=r"worker 0: process \d+ died") as died:
            session.send(2)
        assert set(died.value.workers) == {0}
        assert session.workers[1].call(commands.output)[0] == 2
        session.workers[0].alive = False  # the pool does not ask it again
