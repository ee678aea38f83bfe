"""Connections between the trainer and its workers.

A message is a kind, an index and bytes. The bytes are a pickled value, or a batch as it lies in memory; each message is
authenticated before it is unpickled.
"""

from __future__ import annotations

import pickle
import select
from typing import Any

import torch

from wsync.control import Address, Channel, ChannelListener, connect_channel, readable

# What the trainer sends, then what a worker answers; a worker that joins is first "accepted" or "refused".
KINDS = ("accepted", "refused", "build", "find", "connect", "seed", "resume", "collect", "end")
KINDS += ("ready", "found", "connected", "batch", "error")
_PURPOSE = "collector"
_STALL_LIMIT = 60.0  # seconds: a worker that stops in the middle of a message, and keeps the trainer waiting, is gone


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
        """Send a message of one of the ``KINDS`` with a picklable value; ConnectionError: the other end is gone."""
        self._channel.send(KINDS.index(kind), 0, pickle.dumps(value))

    def send_batch(self, index: int, buffer: torch.Tensor) -> None:
        """Report that the buffer ``index`` is full; send its bytes, unless the other end maps the same memory."""
        data = b"" if self.shares_memory else buffer.numpy().data
        self._channel.send(KINDS.index("batch"), index, data)

    def receive(self, deadline: float | None = None) -> tuple[str, Any]:
        """Wait for a message; return its kind and its value; of a batch the index and the bytes.

        Raises:
            ConnectionError: the other end is gone.
            TimeoutError: nothing came before the deadline.
        """
        if not readable([self.fileno()], deadline):
            raise TimeoutError("no message came in time")
        number, index, payload = self._channel.receive()
        kind = KINDS[number]
        self.told_to_end = kind == "end"
        return kind, (index, payload) if kind == "batch" else pickle.loads(payload)

    def close(self) -> None:
        """Close this end. Idempotent."""
        if self._sentinel is not None:
            self._sentinel.close()
        self._channel.close()


class Listener(ChannelListener):
    """Accepts the connections of workers; see ``wsync.control.ChannelListener``."""

    def __init__(self, host: str | None = None, port: int = 0, key: bytes | None = None) -> None:
        super().__init__(_PURPOSE, "", host, port, key)

    def accept_worker(self) -> tuple[Connection, int, bytes] | None:
        """Return an authenticated connection, the worker's index (-1 for any) and its name; None if there is none."""
        if (accepted := self.accept()) is None:
            return None
        channel, hello = accepted
        channel.set_limit(_STALL_LIMIT)
        return Connection(channel), hello.worker, hello.payload


def connect(address: Address, worker_idx: int, name: bytes, deadline: float | None = None) -> Connection:
    """Connect to a trainer's listener as the worker of an index, or (-1) as any; a name has up to 900 bytes.

    Raises:
        NotConnected: no trainer listens there.
        SyncTimeout: its machine did not answer in time.
    """
    return Connection(connect_channel(address, _PURPOSE, worker_idx, deadline, payload=name))


def milliseconds(seconds: float) -> float:
    """Return a timeout as poll(2) takes it, an int of milliseconds."""
    return min(max(0.0, seconds), 1e6) * 1e3
