"""Connections between the trainer and its workers. The only file of this package that uses ``wsync.control``.

A message is a kind, an index and bytes. The bytes are a pickled value, or a batch as it lies in memory; each message is
authenticated before it is unpickled.
"""

from __future__ import annotations

import pickle
import select
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from wsync.control import Address, Channel, ChannelListener, Frame, connect_channel, readable, shared_key

__all__ = ["Address", "Connection", "Disconnected", "Greeting", "Listener", "connect", "shared_key"]

# What the trainer sends, then what a worker answers; a worker that joins is first "accepted" or "refused".
KINDS = ("accepted", "refused", "build", "ask", "connect", "seed", "resume", "collect", "end")
KINDS += ("ready", "answer", "connected", "batch", "error", "unusable", "ended")
_PURPOSE = "collector"
_STALL_LIMIT = 60.0  # seconds: a worker that stops in the middle of a message, and keeps the trainer waiting, is gone


class Disconnected(Exception):
    """The other end is gone, or is not what it should be."""


class Greeting(NamedTuple):
    """What a worker sends as it connects: its index, or -1 for any, and up to 900 bytes."""

    worker: int
    data: bytes


class Connection:
    """One end of the connection between the trainer and a worker.

    Attributes:
        shares_memory: whether both ends are on one machine, and map the same memory for batches (a Unix socket).
        told_to_end: whether the last message that was received is ``end``.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.shares_memory = channel.local
        self.told_to_end = False
        self._sentinel: select.epoll | None = None

    def fileno(self) -> int:
        """Readable when ``receive`` has something to return."""
        return self._channel.fileno()

    @property
    def sentinel(self) -> int:
        """A descriptor that is readable once the other end's process is gone."""
        if self._sentinel is None:
            self._sentinel = select.epoll()
            self._sentinel.register(self._channel.fileno(), select.EPOLLRDHUP)
            if self._channel.process >= 0:  # a forked child of the other process may hold the socket open
                self._sentinel.register(self._channel.process, select.EPOLLIN)
        return self._sentinel.fileno()

    def send(self, kind: str, value: Any = None) -> None:
        """Send a message of one of the ``KINDS`` with a picklable value.

        Raises:
            Disconnected: the other end is gone.
        """
        self._send(kind, 0, pickle.dumps(value))

    def send_batch(self, index: int, buffer: torch.Tensor) -> None:
        """Report that the buffer ``index`` is full; send its bytes, unless the other end maps the same memory."""
        self._send("batch", index, b"" if self.shares_memory else buffer.numpy().data)

    def _send(self, kind: str, index: int, data: Any) -> None:
        try:
            self._channel.send(Frame(KINDS.index(kind), index, data))
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
            frame = self._channel.receive()
        except ConnectionError as error:
            raise Disconnected(str(error)) from error
        kind = KINDS[frame.kind]
        self.told_to_end = kind == "end"
        return kind, (frame.number, frame.payload) if kind == "batch" else pickle.loads(frame.payload)

    def close(self) -> None:
        """Close this end. Idempotent."""
        if self._sentinel is not None:
            self._sentinel.close()
        self._channel.close()


class Listener:
    """Accepts the connections of workers.

    Args:
        host: the interface to listen on; None for this machine only.
        port: 0 for any free one.
        key: the secret that both ends must have; by default a random one.

    Raises:
        NotConnected: it cannot listen there, or that would be on every interface.
    """

    def __init__(self, host: str | None = None, port: int = 0, key: bytes | None = None) -> None:
        self._listener = ChannelListener(_PURPOSE, "", host, port, key)
        self.address = self._listener.address

    def fileno(self) -> int:
        """Readable when ``accept`` has something to return."""
        return self._listener.fileno()

    def accept(self, deadline: float | None = 0.0) -> tuple[Connection, Greeting] | None:
        """Return an authenticated connection and its greeting; None if none came before the deadline (0: at once)."""
        accepted = self._listener.accept(deadline)
        if accepted is None:
            return None
        channel, hello = accepted
        channel.set_limit(_STALL_LIMIT)
        return Connection(channel), Greeting(hello.worker, hello.payload)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._listener.close()


def connect(address: Address, greeting: Greeting, deadline: float | None = None) -> Connection:
    """Connect to a trainer's listener.

    Raises:
        NotConnected: no trainer listens there.
        SyncTimeout: its machine did not answer in time.
    """
    return Connection(connect_channel(address, _PURPOSE, greeting.worker, deadline, payload=greeting.data))


def public_text(address: Address) -> str:
    """Return an address for a public place; what reads it there has the shared key."""
    return address.dump(public=True)


def from_public_text(text: str | bytes) -> Address:
    """Return the address of the output of ``public_text``; ValueError for anything else."""
    return replace(Address.load(text), key=shared_key())


def readable_within(descriptor: int, deadline: float | None) -> bool:
    """Wait until a descriptor is readable; return False at the deadline, on ``time.monotonic``'s clock."""
    return readable([descriptor], deadline)


def milliseconds(seconds: float) -> float:
    """Return a timeout as poll(2) takes it, an int of milliseconds."""
    return min(max(0.0, seconds), 1e6) * 1e3
