"""Both ends of a connection by RPC calls, in one process that calls itself."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import rpc

import wsync
from wsync.backends import rpc_calls
from wsync.backends.rpc_sender import RpcListener, RpcWorkerConnection
from wsync.backends.rpc_worker import RpcSenderConnection
from wsync.control.liveness import own_identity
from wsync.control.messages import PROTOCOL, Kind, Message
from wsync.deadlines import deadline_in, wait_readable


@contextmanager
def listening(path: Path) -> Iterator[RpcListener]:
    """A group with one member, which has a sender."""
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", _transports=["uv"], _channels=["basic"])
    rpc.init_rpc("trainer", rank=0, world_size=1, rpc_backend_options=options)
    listener = RpcListener("key", "127.0.0.1")
    try:
        yield listener
    finally:
        listener.close()
        rpc.shutdown()


def connect(listener: RpcListener) -> tuple[RpcSenderConnection, Any]:
    worker = RpcSenderConnection("key", "trainer", "127.0.0.1", 0, deadline_in(30.0))
    accepted = listener.accept()
    assert accepted is not None
    return worker, accepted[0]


def received(connection: Any) -> Message | None:
    assert wait_readable([connection.fileno()], deadline_in(15.0)), "nothing has arrived"
    return connection.receive()


def run(function: Callable[[Path], Any], path: Path) -> Any:
    """Call ``function`` in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as pool:
        return pool.submit(function, path / "store").result()


class Raising:
    """A worker's handler of messages."""

    def on_readable(self) -> bool:
        raise ValueError("of a model")


def the_end_after_a_raising_handler(path: Path) -> object:
    with listening(path) as listener:
        worker, connection = connect(listener)
        worker.attach(Raising())
        connection.send(Message(Kind.UPDATE, 0, 1))
        return received(connection)


def the_end_after_a_call_that_cannot_be_made(path: Path) -> object:
    with listening(path) as listener:
        listener.register(("key", 0, "connection"), PROTOCOL, "a name that no process has", own_identity())
        accepted = listener.accept()
        assert accepted is not None and isinstance(accepted[0], RpcWorkerConnection)
        with pytest.raises(ConnectionError, match="cannot be called"):
            accepted[0].send(Message(Kind.UPDATE, 0, 1))
        return received(accepted[0])


@pytest.mark.parametrize("function", [the_end_after_a_raising_handler, the_end_after_a_call_that_cannot_be_made])
def test_a_failed_call_ends_the_connection(function: Callable[[Path], object], tmp_path: Path) -> None:
    assert run(function, tmp_path) is None


class Stopped:
    """A sender that takes one message late. Implements ``SenderEndpoint``.

    Attributes:
        goes_on: to be set when the sender continues.
    """

    def __init__(self, listener: RpcListener) -> None:
        self._listener = listener
        self._first = threading.Lock()
        self.register = listener.register
        self.goes_on = threading.Event()

    def deliver(self, connection_id: rpc_calls.ConnectionId, number: int, data: bytes) -> None:
        if self._first.acquire(blocking=False):
            self.goes_on.wait()
        self._listener.deliver(connection_id, number, data)


def versions_while_the_sender_is_stopped(path: Path) -> list[int]:
    with listening(path) as listener:
        worker, connection = connect(listener)
        stopped = Stopped(listener)
        rpc_calls.sender_endpoints["key"] = stopped
        try:
            for version in (1, 2, 3):
                worker.send(Message(Kind.ACK, 0, version))
        finally:
            stopped.goes_on.set()
        messages = [received(connection) for _ in range(3)]
        return [message.version for message in messages if message is not None]


def test_a_sender_that_is_stopped_gets_all_messages_later_and_in_order(tmp_path: Path) -> None:
    assert run(versions_while_the_sender_is_stopped, tmp_path) == [1, 2, 3]


def connect_as_another(path: Path) -> str:
    with listening(path), wsync.RPCWeightSyncScheme(trainer="chief", timeout=2.0) as scheme:
        scheme.init_on_sender("policy", num_workers=1)
        with pytest.raises(wsync.WeightSyncError) as caught:
            scheme.connect()
        return f"{caught.type.__name__}: {caught.value}"


def test_a_trainer_with_another_name_than_its_workers_call_is_an_error_at_once(tmp_path: Path) -> None:
    assert "NotConnected: the trainer is 'trainer' in RPC, and workers call 'chief'" in run(
        connect_as_another, tmp_path
    )
