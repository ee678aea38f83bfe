"""How a worker and the trainer meet over TCP, and how each hears of the other's end.

There are two connections to each worker: the line, and one that says nothing, whose end is the end of the process at
its other end. Who knows the key is let in (HMAC both ways, as in ``multiprocessing``); nothing is encrypted, so a key
and a batch must not cross a network that others can listen to.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Literal

from wsync import NotConnected

_HANDSHAKE = 5  # seconds in which a visitor has to have shown that it knows the key
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3, socket.TCP_USER_TIMEOUT: 25_000}
Address = tuple[str, int]


@dataclass(frozen=True)
class Hello:
    """What a worker says first, on both of its connections.

    Attributes:
        pair: the same on both, and nobody else's.
        worker_idx: which worker it is; -1: any.
        name: where and what it is, for errors.
    """

    purpose: Literal["line", "life"]
    pair: bytes
    worker_idx: int
    name: str


class Door:
    """The trainer's open door.

    Args:
        host: the interface to listen on.
        port: 0 for any that is free.
        authkey: what visitors must know.

    Raises:
        OSError: it cannot listen there; says where.
    """

    def __init__(self, host: str, port: int, authkey: bytes) -> None:
        try:
            self._socket = socket.create_server((host, port), backlog=128)
        except OSError as error:
            raise OSError(error.errno, f"cannot listen on {host}:{port} ({error.strerror or error})") from error
        self._authkey = authkey

    @property
    def address(self) -> Address:
        """Where it is."""
        return self._socket.getsockname()[:2]

    def fileno(self) -> int:
        """Readable when somebody is at the door."""
        return self._socket.fileno()

    def admit(self) -> tuple[Connection, Hello] | None:
        """Let in who is at the door; None if it was a stranger."""
        connection = _connection(self._socket.accept()[0])
        try:
            deliver_challenge(connection, self._authkey)
            answer_challenge(connection, self._authkey)
            hello = connection.recv()
        except (AuthenticationError, EOFError, OSError):
            connection.close()
            return None
        _patiently(connection)
        return connection, hello

    def close(self) -> None:
        """Shut it; harmless when repeated."""
        self._socket.close()


def knock(address: Address, authkey: bytes, hello: Hello, timeout: float) -> Connection:
    """Connect to the trainer.

    Raises:
        NotConnected: nobody listens there, or somebody else does.
    """
    where = f"{address[0]}:{address[1]}"
    try:
        connection = _connection(socket.create_connection(address, timeout))
    except OSError as error:
        raise NotConnected(f"no trainer listens at {where} ({error}): start it first") from error
    try:
        answer_challenge(connection, authkey)
        deliver_challenge(connection, authkey)
        connection.send(hello)
    except (AuthenticationError, EOFError, OSError) as error:
        connection.close()
        raise NotConnected(f"the trainer at {where} does not let this worker in: another key? ({error})") from error
    _patiently(connection)
    return connection


def _connection(sock: socket.socket) -> Connection:
    sock.setblocking(True)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that vanished is noticed in half a minute
    for option, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _HANDSHAKE, 0))
    return Connection(sock.detach())


def _patiently(connection: Connection) -> None:
    """End the handshake's deadline: from now on a death ends a wait."""
    with socket.socket(fileno=socket.dup(connection.fileno())) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
