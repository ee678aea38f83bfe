"""Connections between the trainer and its workers. The only file of this package that uses ``wsync.control``.

A message is a kind, an index and bytes. The bytes are a pickled value, or a batch as it lies in memory; they are
unpickled only after the connection has been authenticated.
"""

from __future__ import annotations

import pickle
import select
import socket
import time
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from wsync import NotConnected, control

# What the trainer sends, then what a worker answers; a worker that joins is first "accepted" or "refused".
KINDS = ("accepted", "refused", "build", "ask", "connect", "seed", "resume", "collect", "end")
KINDS += ("ready", "answer", "connected", "batch", "error", "unusable", "ended")
_END = KINDS.index("end")
_PEEKED = 1 << 16  # bytes


class Disconnected(Exception):
    """The other end is gone, or is not what it should be."""


class Address(NamedTuple):
    """Where a trainer listens: by TCP, or (without a host) by a Unix socket; and the key that a worker must have."""

    host: str
    port: int | str
    key: bytes


class Greeting(NamedTuple):
    """What a worker sends as it connects: its index, or -1 for any, and up to 900 bytes."""

    worker: int
    data: bytes


class Connection:
    """One end of the connection between the trainer and a worker.

    Attributes:
        shares_memory: whether both ends are on one machine, and map the same memory for batches (a Unix socket).
    """

    def __init__(self, connection: control.Connection) -> None:
        self._connection = connection
        self.shares_memory = connection.passes_descriptors
        self._sentinel: select.epoll | None = None
        self._told_to_end = False

    def fileno(self) -> int:
        """Return the descriptor that is readable when ``receive`` has something to return."""
        return self._connection.fileno()

    @property
    def sentinel(self) -> int:
        """A descriptor that is readable once the other end's process is gone. Ask after the first ``receive``."""
        if self._sentinel is None:
            self._sentinel = select.epoll()
            own, *processes = self._connection.descriptors
            self._sentinel.register(own, select.EPOLLRDHUP)
            for process in processes:  # a pidfd: a forked child of the other process may hold the socket open
                self._sentinel.register(process, select.EPOLLIN)
        return self._sentinel.fileno()

    def send(self, kind: str, value: Any = None, *, wait: bool = False) -> None:
        """Send a message of one of the ``KINDS`` with a picklable value.

        With ``wait``, it has left this process afterwards; else a background thread may send the rest.

        Raises:
            Disconnected: the other end is gone.
            ValueError: the message is larger than 1 GiB.
        """
        self._send(kind, 0, pickle.dumps(value), wait=wait)

    def send_batch(self, index: int, buffer: torch.Tensor) -> None:
        """Report that the buffer ``index`` is full; send its bytes, unless the other end maps the same memory."""
        if self.shares_memory:
            self._send("batch", index, b"")
        else:
            self._send("batch", index, buffer.numpy().data, wait=True)  # a view: the buffer is written again afterwards

    def _send(self, kind: str, index: int, data: Any, *, wait: bool = False) -> None:
        message = control.Message(control.Kind.DATA, index, KINDS.index(kind), data)
        try:
            self._connection.send(message)
            if wait:
                self._connection.flush()
        except ConnectionError as error:
            raise Disconnected(str(error)) from error

    def receive(self, deadline: float | None = None) -> tuple[str, Any]:
        """Wait for a message; return its kind and its value; of a batch the index and the bytes.

        Raises:
            Disconnected: the other end is gone.
            TimeoutError: nothing came before the deadline.
        """
        if not readable_within(self.fileno(), deadline):
            raise TimeoutError("no message came in time")
        try:
            message = self._connection.receive()
        except NotConnected as error:
            raise Disconnected(str(error)) from error
        if message is None:
            raise Disconnected("the other end of the connection is gone")
        kind = KINDS[message.version]
        self._told_to_end = kind == "end"
        return kind, (message.worker, message.payload) if kind == "batch" else pickle.loads(message.payload)

    @property
    def told_to_end(self) -> bool:
        """Whether the last message that has arrived, read or not, is ``end``."""
        if self._told_to_end:
            return True
        end = control.Message(control.Kind.DATA, 0, _END, pickle.dumps(None)).pack()
        with socket.socket(fileno=socket.dup(self.fileno())) as sock, suppress(OSError):
            return sock.recv(_PEEKED, socket.MSG_PEEK | socket.MSG_DONTWAIT).endswith(end)
        return False

    def close(self) -> None:
        """Close this end. Idempotent."""
        if self._sentinel is not None:
            self._sentinel.close()
        self._connection.close()


class Listener:
    """Accepts the connections of workers.

    Args:
        host: the interface to listen on; None for a Unix socket.
        port: 0 for any free one.
        key: the secret that both ends must have; by default a random one.

    Raises:
        NotConnected: it cannot listen there, or that would be on every interface.
    """

    def __init__(self, host: str | None = None, port: int = 0, key: bytes | None = None) -> None:
        self._listener = control.Listener(host, port, key)
        own = self._listener.address
        self.address = Address(own.host, own.port, own.token)

    def fileno(self) -> int:
        """Return the descriptor that is readable when ``accept`` has something to do."""
        return self._listener.fileno()

    def accept(self, deadline: float | None = 0.0) -> tuple[Connection, Greeting] | None:
        """Return an authenticated connection and its greeting; None if none came before the deadline (0: at once)."""
        while (accepted := self._listener.accept()) is None:
            late = deadline is not None and time.monotonic() >= deadline
            if late or not readable_within(self.fileno(), deadline):
                return None
        connection, hello = accepted
        return Connection(connection), Greeting(hello.worker, hello.payload)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._listener.close()


def connect(address: Address, greeting: Greeting, deadline: float | None = None) -> Connection:
    """Connect to a trainer's listener.

    Raises:
        NotConnected: no trainer listens there.
        SyncTimeout: its machine did not answer in time.
    """
    return Connection(control.connect(control.Address(*address), greeting.worker, deadline, greeting.data))


def sealed(address: Address) -> str:
    """Return an address for a public place: authenticated, with its key encrypted."""
    return control.seal(control.Address(*address))


def unsealed(text: str | bytes) -> Address:
    """Return the address of the output of ``sealed``; ValueError for anything else."""
    found = control.unseal(text)
    return Address(found.host, found.port, found.token)


def readable_within(descriptor: int, deadline: float | None) -> bool:
    """Wait until a descriptor is readable; return False at the deadline, on ``time.monotonic``'s clock."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(None if deadline is None else milliseconds(deadline - time.monotonic())))


def milliseconds(seconds: float) -> float:
    """Return a timeout as poll(2) takes it, an int of milliseconds."""
    return min(max(0.0, seconds), 1e6) * 1e3
