"""The calls that ``torch.distributed.rpc`` makes from one end of a line to the other, and who answers them.

What the trainer says is a call of ``_receive_weights_scheme`` in the worker, which does it (through the gate) and
returns what the worker has to say to it. What a worker says of itself is a call the other way. An end that is waited
for has a descriptor, as a socket would: a counting eventfd.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Protocol

from torch.distributed import rpc

from wsync.errors import NotConnected
from wsync.wire.identity import identity
from wsync.wire.words import Kind, Message, unpack

End = tuple[str, int, str]
"""Of one line: the key of its door, the worker's index, and what tells one attempt to come in from another."""


class Porter(Protocol):
    """Who answers in the trainer, for one door."""

    def knock(self, end: End, protocol: int, name: str, who: bytes) -> None:
        """A worker asks to be let in."""
        ...

    def hear(self, end: End, data: bytes) -> None:
        """A worker says something of itself."""
        ...


class Server(Protocol):
    """Who answers in a worker, for one line."""

    def serve(self, number: int, message: Message) -> list[bytes]:
        """Do what the trainer said; what there is to reply."""
        ...


porters: dict[str, Porter] = {}  # by the door's key
servers: dict[End, Server] = {}


def knock(end: End, protocol: int, name: str, who: bytes) -> bytes:
    """Called in the trainer, by a worker that wants to be let in; the trainer's identity.

    Raises:
        NotConnected: there is no such door.
    """
    porter = porters.get(end[0])
    if porter is None:
        raise NotConnected("there is no such sender here (any more)")
    porter.knock(end, protocol, name, who)
    return identity()


def there(key: str) -> bool:
    """Called in the trainer: whether that door is open."""
    return key in porters


def hear(end: End, data: bytes) -> None:
    """Called in the trainer, with what a worker says of itself."""
    porter = porters.get(end[0])
    if porter is not None:
        porter.hear(end, data)


def _receive_weights_scheme(end: End, number: int, data: bytes) -> list[bytes]:
    """Called in a worker, for everything that the trainer says; weights that it announces come by their own way.

    Who has given up, and whom the trainer has not heard saying so, says it in reply.
    """
    server = servers.get(end)
    return [Message(Kind.BYE).pack()] if server is None else server.serve(number, unpack(data))


receive_weights_scheme = _receive_weights_scheme


def own_name() -> str:
    """This process's name among its RPC peers.

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
    """What has been said and not been read, behind a descriptor that is readable while there is something."""

    def __init__(self) -> None:
        self._messages: deque[Message | None] = deque()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Readable while something waits; below 0 when closed."""
        return self._bell

    @property
    def waiting(self) -> bool:
        """Whether something waits."""
        return bool(self._messages)

    def put(self, message: Message | None) -> None:
        """Add a message, or (None) the end of the line; nothing happens if it is closed."""
        with self._lock:
            if self._bell >= 0:
                self._messages.append(message)
                os.eventfd_write(self._bell, 1)

    def get(self) -> Message | None:
        """What has waited longest."""
        with self._lock:
            os.eventfd_read(self._bell)
            return self._messages.popleft()

    def close(self) -> None:
        """Let the descriptor go; harmless when repeated."""
        with self._lock:
            if self._bell >= 0:
                os.close(self._bell)
                self._bell = -1
