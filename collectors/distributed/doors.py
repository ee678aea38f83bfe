"""How a worker and the trainer meet over TCP, and how each hears of the other's end.

There are two connections to each worker: the line, and one that says nothing, whose end is the end of the process at
its other end. Who knows the key is let in (HMAC both ways, as in ``multiprocessing``); nothing is encrypted, so a key
and a batch must not cross a network that others can listen to.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Literal

from collectors.distributed.calls import WakeEvent
from wsync import NotConnected, listen_on

_HANDSHAKE = 5.0  # seconds in which a visitor has to have shown that it knows the key
_ROOM = 64  # visitors at a time
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


Visitor = tuple[Connection, Hello]
"""Who knows the key."""


class Door:
    """The trainer's open door.

    Args:
        host: the interface to listen on.
        port: 0 for any that is free.
        authkey: what visitors must know.

    Raises:
        NotConnected: it cannot listen there, or that would be on every interface.
    """

    def __init__(self, host: str, port: int, authkey: bytes) -> None:
        self._socket = listen_on(host, port)
        self._socket.setblocking(False)
        self._authkey = authkey
        self._lock = threading.Lock()
        self._visitors: list[Connection] = []  # who has not shown yet that it knows the key
        self._admitted: list[Visitor] = []
        self._some = WakeEvent()  # somebody was admitted

    @property
    def address(self) -> Address:
        """Where it is."""
        return self._socket.getsockname()[:2]

    @property
    def signs(self) -> tuple[int, int]:
        """Descriptors, one of which is readable when ``admit`` has something to do."""
        return self._socket.fileno(), self._some.fileno()

    def admit(self) -> list[Visitor]:
        """Begin to hear who is at the door; who has shown the key since the last call. Waits for nobody."""
        with suppress(BlockingIOError, ConnectionError):  # nobody is there, or is gone again
            self._hear(_connection(self._socket.accept()[0]))
        with self._lock:
            admitted, self._admitted = self._admitted, []
            if admitted:
                self._some.clear()
        return admitted

    def _hear(self, connection: Connection) -> None:
        with self._lock:
            if len(self._visitors) == _ROOM:
                _hang_up(self._visitors.pop(0))  # who has been here longest
            self._visitors.append(connection)
        threading.Thread(target=self._shake_hands, args=(connection,), name="collector-door", daemon=True).start()

    def _shake_hands(self, connection: Connection) -> None:
        hello: Hello | None = None
        try:  # a stranger is none of the trainer's business
            with suppress(AuthenticationError, EOFError, OSError), _ended_after(connection, _HANDSHAKE):
                deliver_challenge(connection, self._authkey)
                answer_challenge(connection, self._authkey)
                hello = connection.recv()
        finally:
            self._settle(connection, hello)

    def _settle(self, connection: Connection, hello: Hello | None) -> None:
        with self._lock:
            still_here = connection in self._visitors
            if still_here:
                self._visitors.remove(connection)
            if still_here and hello is not None:
                self._admitted.append((connection, hello))
                self._some.set()
            else:
                connection.close()

    def close(self) -> None:
        """Shut it, and send away who is there; harmless when repeated."""
        self._socket.close()
        with self._lock:
            for connection in self._visitors:
                _hang_up(connection)  # whose thread closes it
            for connection, _ in self._admitted:
                connection.close()
            self._visitors, self._admitted = [], []
            self._some.close()


def knock(address: Address, authkey: bytes, hello: Hello, deadline: float) -> Connection:
    """Connect to the trainer, until ``deadline`` on ``time.monotonic``'s clock.

    Raises:
        NotConnected: nobody listens there, or somebody else does, or does not answer in time.
    """
    where = f"{address[0]}:{address[1]}"
    try:
        connection = _connection(socket.create_connection(address, _left(deadline)))
    except OSError as error:
        raise NotConnected(f"no trainer listens at {where} ({error}): start it first") from error
    try:
        with _ended_after(connection, _left(deadline)):
            answer_challenge(connection, authkey)
            deliver_challenge(connection, authkey)
            connection.send(hello)
    except TimeoutError as error:
        connection.close()
        raise NotConnected(f"whoever listens at {where} does not answer: is the trainer stopped?") from error
    except (AuthenticationError, EOFError, OSError) as error:
        connection.close()
        raise NotConnected(f"the trainer at {where} does not let this worker in: another key? ({error})") from error
    return connection


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _connection(sock: socket.socket) -> Connection:
    sock.setblocking(True)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that vanished is noticed in half a minute
    for option, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return Connection(sock.detach())


@contextmanager
def _ended_after(connection: Connection, seconds: float) -> Iterator[None]:
    """Hang up if the block is not done after so long, however often something comes meanwhile.

    Raises:
        TimeoutError: it was not.
    """
    late = threading.Event()

    def end() -> None:
        late.set()
        _hang_up(connection)

    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if late.is_set():
            raise TimeoutError(f"not done after {seconds:g} s")


def _hang_up(connection: Connection) -> None:
    """End both directions of a connection, which whoever reads it will close."""
    with socket.socket(fileno=socket.dup(connection.fileno())) as sock, suppress(OSError):  # it may have ended already
        sock.shutdown(socket.SHUT_RDWR)
