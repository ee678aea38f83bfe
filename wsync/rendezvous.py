"""How processes of one machine meet: a Unix socket with an abstract name, so nothing is left in a file system.

The sender listens from ``init_on_sender`` on; the address travels in the pickled scheme. A worker that connects, at any
time, says who it is. Each end then holds a socket of whole messages (``SOCK_SEQPACKET``) that can also carry
descriptors, and a process descriptor of the other, so that a death wakes every wait.

Only processes of the same user that know the endpoint's random token are let in.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from wsync.errors import NotConnected

PROTOCOL = 1
_HEADER = struct.Struct("<BxxxiQQdd")  # kind, worker, version, length, wait, apply
_INLINE = 32_768  # bytes; a longer payload goes through a memory file, whose descriptor is attached
_ATTACHED = 1 << 63


class Kind(IntEnum):
    """What a message says. The first six go to a worker, the others come from one."""

    WELCOME = 1  # payload: the layout, or nothing yet; descriptors of the arena
    REFUSED = 2  # payload: why
    LAYOUT = 3  # the layout, after a lazy start; descriptors of the arena
    NEWS = 4  # a version is published: pass through the gate
    STAGE = 5  # check a version and keep it ready; payload: transaction
    DROP = 6  # the transaction is off
    HELLO = 16  # payload: protocol, token
    ACK = 17  # a version is installed
    STAGED = 18  # a version is checked and ready
    FAILED = 19  # it is not; payload: the traceback
    FREED = 20  # a slot that the sender waits for is free
    BYE = 21  # this worker leaves of its own will


@dataclass(frozen=True, slots=True)
class Message:
    """One message between the two ends; ``fds`` are owned by whoever received it."""

    kind: Kind
    worker: int = -1
    version: int = 0
    payload: bytes = b""
    wait: float = 0.0
    apply: float = 0.0
    fds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a sender listens, and what a worker must know to be let in. Travels in a pickled scheme."""

    address: bytes
    token: bytes


def remaining(deadline: float | None) -> float | None:
    """Seconds until ``deadline`` (on ``time.monotonic``'s clock), not below 0; ``None`` for no deadline."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def deadline_in(timeout: float | None) -> float | None:
    """The moment ``timeout`` seconds from now; ``None`` for none."""
    return None if timeout is None else time.monotonic() + timeout


def wait_readable(descriptors: Iterable[int], deadline: float | None) -> list[int]:
    """Those of ``descriptors`` that are readable (or closed), as soon as one is; empty at the deadline."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    left = remaining(deadline)
    return [descriptor for descriptor, _ in poller.poll(None if left is None else -(-left * 1000 // 1))]


class Connection:
    """One end of the line between a sender and one worker."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.pid, self.uid, _ = struct.unpack("iii", peer)
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            sock.close()
            raise NotConnected("the other end died while it was connecting") from None

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send one message, whole.

        Raises:
            ConnectionError: the other end is gone.
        """
        payload, fds = message.payload, list(message.fds)
        length = len(payload)
        if length > _INLINE:
            attached = os.memfd_create("wsync-message", os.MFD_CLOEXEC)
            with os.fdopen(attached, "wb", closefd=False) as file:
                file.write(payload)
            fds.append(attached)
            payload, length = b"", length | _ATTACHED
        header = _HEADER.pack(message.kind, message.worker, message.version, length, message.wait, message.apply)
        try:
            if fds:
                socket.send_fds(self._socket, [header + payload], fds)
            else:
                self._socket.send(header + payload)
        finally:
            if length & _ATTACHED:
                os.close(fds[-1])

    def call(self, message: Message) -> None:
        """Send a message without payload, unless the other end has not read so many that one more says nothing new."""
        header = _HEADER.pack(message.kind, message.worker, message.version, 0, message.wait, message.apply)
        try:
            self._socket.send(header, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return

    def receive(self) -> Message | None:
        """The next message, once the descriptor is readable; ``None`` if the other end is gone."""
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, _INLINE + _HEADER.size, 4)
        except ConnectionError:
            return None
        if not data:
            return None
        kind, worker, version, length, wait, apply = _HEADER.unpack_from(data)
        payload = data[_HEADER.size :]
        if length & _ATTACHED:
            *fds, attached = fds
            with os.fdopen(attached, "rb") as file:
                file.seek(0)
                payload = file.read()
        return Message(Kind(kind), worker, version, payload, wait, apply, tuple(fds))

    def close(self) -> None:
        """Close the line; harmless when repeated."""
        if self._socket.fileno() >= 0:
            self._socket.close()
            os.close(self.pidfd)


class Listener:
    """The sender's open door."""

    def __init__(self) -> None:
        name = secrets.token_hex(16).encode()
        self.endpoint = Endpoint(b"\0wsync-" + name, secrets.token_bytes(16))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(self.endpoint.address)
        self._socket.listen(128)

    def fileno(self) -> int:
        """Readable when somebody is at the door."""
        return self._socket.fileno()

    def accept(self) -> tuple[Connection, Message] | None:
        """Let in who is at the door; ``None`` if it was a stranger, or gone again.

        The worker sends its greeting right behind its connection, so the wait for it is bounded to a second.
        """
        connection = Connection(self._socket.accept()[0])
        if connection.uid == os.getuid() and wait_readable([connection.fileno()], deadline_in(1.0)):
            hello = connection.receive()
            if hello and hello.kind is Kind.HELLO and secrets.compare_digest(hello.payload, self.endpoint.token):
                return connection, hello
        connection.close()
        return None

    def close(self) -> None:
        """Shut the door; harmless when repeated."""
        self._socket.close()


def knock(endpoint: Endpoint, worker: int) -> Connection:
    """Connect to a sender as worker ``worker``.

    Raises:
        NotConnected: no sender listens there (any more).
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(endpoint.address)
        connection = Connection(sock)
        connection.send(Message(Kind.HELLO, worker, PROTOCOL, endpoint.token))
    except OSError as error:
        sock.close()
        raise NotConnected(f"worker {worker}: the sender is gone, or has been shut down ({error})") from error
    return connection


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)
