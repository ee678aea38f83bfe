"""The calls that ``torch.distributed.rpc`` makes between a sender and its workers, and the objects that serve them.

A message of the sender is a call of ``serve_message`` in the worker, which processes it (inside the gate) in
the thread of the call, and returns what the worker answers. What a worker sends by itself is a call in the other
direction.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from torch.distributed import rpc

from wsync.control.liveness import PeerProcess, own_identity
from wsync.control.messages import HEADER_SIZE, Kind, Message, payload_length, unpack
from wsync.errors import NotConnected

ConnectionId = tuple[str, int, str]
"""Of one connection: the sender's key, the worker's index, and a random name of the connection."""


class SenderEndpoint(Protocol):
    """Serves the workers' calls in the sender's process, for one sender. Called by RPC's threads."""

    def register(self, connection_id: ConnectionId, protocol: int, name: str, identity: bytes) -> None:
        """A worker connects. Called once per connection."""
        ...

    def deliver(self, connection_id: ConnectionId, number: int, data: bytes) -> None:
        """A worker has sent a message by itself; ``number`` counts them from 1."""
        ...


ServeMessage = Callable[[int, Message], list[bytes]]
"""In a worker: processes a message of the sender, given its number; returns the answers. Called by RPC's threads."""

sender_endpoints: dict[str, SenderEndpoint] = {}  # by key
worker_endpoints: dict[ConnectionId, ServeMessage] = {}


def decode(data: bytes) -> Message:
    """Return the message in ``data``.

    Raises:
        ValueError: it is malformed.
    """
    if len(data) < HEADER_SIZE or len(data) != HEADER_SIZE + payload_length(data):
        raise ValueError("a message of a wrong length")
    return unpack(data, data[HEADER_SIZE:])


def register_worker(connection_id: ConnectionId, protocol: int, name: str, identity: bytes) -> bytes:
    """Register a worker. Called in the sender, by the worker; returns the sender's identity.

    Raises:
        NotConnected: there is no such sender.
    """
    sender = sender_endpoints.get(connection_id[0])
    if sender is None:
        raise NotConnected("there is no such sender here (any more)")
    sender.register(connection_id, protocol, name, identity)
    return own_identity()


def sender_is_open(key: str) -> bool:
    """Return whether a sender is there. Called in the sender's process, by a worker."""
    return key in sender_endpoints


def deliver_to_sender(connection_id: ConnectionId, number: int, data: bytes) -> None:
    """Take a message that a worker has sent by itself. Called in the sender's process."""
    sender = sender_endpoints.get(connection_id[0])
    if sender is not None:
        sender.deliver(connection_id, number, data)


def serve_message(connection_id: ConnectionId, number: int, data: bytes) -> list[bytes]:
    """Process a message of the sender; weights that it announces take their own way. Called in a worker.

    A worker that has left answers that it has left, if the sender has not received its message about that.
    """
    serve = worker_endpoints.get(connection_id)
    return [Message(Kind.LEAVE).pack()] if serve is None else serve(number, decode(data))


def own_name() -> str:
    """Return this process's name in RPC.

    Raises:
        NotConnected: RPC is not initialised here.
    """
    try:
        return rpc.get_worker_info().name
    except RuntimeError as error:
        raise NotConnected(
            "torch.distributed.rpc is not initialised in this process: call init_rpc(name, rank=…, world_size=…) first"
        ) from error


class Inbox:
    """Messages that have arrived and were not read, behind a descriptor that is readable while there are any."""

    def __init__(self) -> None:
        self._messages: deque[Message | None] = deque()
        self._out_of_order: dict[int, Message] = {}  # by number: messages that wait for one with a smaller number
        self._numbered = 0  # the number of the last message that was added in order
        self._count = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor; negative once closed."""
        return self._count

    @property
    def waiting(self) -> bool:
        """Whether there are any."""
        return bool(self._messages)

    def put(self, message: Message | None) -> None:
        """Add a message, or (None) the end of the connection; nothing happens once closed."""
        with self._lock:
            self._append(message)

    def put_in_order(self, number: int, message: Message) -> None:
        """Add a message after those with smaller numbers. The first has number 1.

        A message that arrives early is kept until those before it have arrived: RPC keeps no order.
        """
        with self._lock:
            self._out_of_order[number] = message
            while (following := self._out_of_order.pop(self._numbered + 1, None)) is not None:
                self._numbered += 1
                self._append(following)

    def _append(self, message: Message | None) -> None:
        if self._count >= 0:
            self._messages.append(message)
            os.eventfd_write(self._count, 1)

    def get(self) -> Message | None:
        """Remove and return the oldest."""
        with self._lock:
            os.eventfd_read(self._count)
            return self._messages.popleft()

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            if self._count >= 0:
                os.close(self._count)
                self._count = -1


class RpcConnection(ABC):
    """What both ends of a connection have (a ``Connection``): calls bring messages, which wait in an inbox.

    Args:
        connection_id: the id of the connection.
        name: the name of the other process in RPC.
        identity: its ``own_identity()``; empty if it is not known yet.
    """

    socket_fd = -1  # see `Connection`: it has no socket
    busy = False

    def __init__(self, connection_id: ConnectionId, name: str, identity: bytes = b"") -> None:
        self._id = connection_id
        self._name = name
        self._peer = PeerProcess(identity)
        self._inbox = Inbox()
        self._opener = os.getpid()
        self._sent = 0  # calls of the other process with messages

    @property
    def descriptors(self) -> Sequence[int]:
        """See ``Connection``."""
        return (self._inbox.fileno(), *self._peer.descriptors)

    def fileno(self) -> int:
        """See ``Connection``."""
        return self._inbox.fileno()

    def receive(self) -> Message | None:
        """See ``Connection``."""
        return self._inbox.get()

    @abstractmethod
    def send(self, message: Message, *, may_drop: bool = False) -> None:
        """See ``Connection``."""

    def flush(self, deadline: float | None = None) -> None:  # noqa: B027
        """See ``Connection``: no call is lost by ``close``."""

    def interrupt(self) -> None:
        """See ``Connection``."""
        self._inbox.put(None)

    def _require_opener(self) -> None:
        if os.getpid() != self._opener:
            raise ConnectionError("this connection belongs to the parent of this forked process")
