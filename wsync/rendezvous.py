"""How processes of one machine meet: a Unix socket with an abstract name, so nothing is left in a file system.

The sender listens from ``init_on_sender`` on; the address travels in the pickled scheme. A worker that connects, at any
time, says who it is. Each end then holds a socket of whole messages (``SOCK_SEQPACKET``) that can also carry
descriptors, and a process descriptor of the other, so that a death wakes every wait.

Only processes of the same user that know the endpoint's random token are let in.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from wsync.deadlines import deadline_in, wait_readable
from wsync.errors import NotConnected
from wsync.words import HEADER_SIZE, PROTOCOL, Kind, Message, length_in, unpack

_INLINE = 32_768  # bytes; a longer payload goes through a memory file, whose descriptor is attached
_ATTACHED = 1 << 63
_ROOM = socket.CMSG_SPACE(4 * 4)  # for four descriptors


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a sender listens, and what a worker must know to be let in. Travels in a pickled scheme."""

    address: bytes
    token: bytes


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

    @property
    def peer(self) -> str:
        """The other process."""
        return f"process {self.pid}"

    @property
    def signs(self) -> Sequence[int]:
        """The socket's descriptor, and the process's."""
        return (self._socket.fileno(), self.pidfd)

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
        header = message.header(length)
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
        try:
            self._socket.send(message.header(0), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return

    def receive(self) -> Message | None:
        """The next message, once the descriptor is readable; ``None`` if the other end is gone."""
        try:
            data, attached, _, _ = self._socket.recvmsg(_INLINE + HEADER_SIZE, _ROOM)
        except ConnectionError:
            return None
        if not data:
            return None
        if not attached:
            return unpack(data)
        fds = struct.unpack(f"{len(attached[0][2]) // 4}i", attached[0][2])
        if not length_in(data) & _ATTACHED:
            return unpack(data, fds=fds)
        with os.fdopen(fds[-1], "rb") as file:
            file.seek(0)
            return unpack(data, file.read(), fds[:-1])

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
