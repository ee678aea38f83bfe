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
from functools import partial
from typing import Any

from wsync.deadlines import milliseconds
from wsync.errors import NotConnected, SyncTimeout
from wsync.wire.lobby import TOKEN, Lobby, Visitor, greeting
from wsync.wire.sockets import end, require_opener
from wsync.wire.words import HEADER_SIZE, PROTOCOL, Kind, Line, Message, length_in, unpack

_INLINE = 32_768  # bytes; a longer payload goes through a memory file, whose descriptor is attached
_ATTACHED = 1 << 63
_ROOM = socket.CMSG_SPACE(4 * 4)  # for four descriptors
_MOST = 1 << 30  # bytes of one message; a longer one is nonsense
_SEND_TIMEOUT = struct.pack("ll", 5, 0)  # seconds in which there has to be room for one more message, and microseconds


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a sender listens, and what a worker must know to be let in. Travels in a pickled scheme."""

    address: bytes
    token: bytes


class LocalLine:
    """One end of the line between a sender and one worker."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._opener = os.getpid()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
        self.pid, self.uid = _peer_of(sock)
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
            ConnectionError: the other end is gone, or has stopped reading long ago; or this is a forked child.
        """
        require_opener(self._opener)
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
        except BlockingIOError as error:
            raise ConnectionError(f"{self.peer} does not read") from error
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
        """The next message, once the descriptor is readable; ``None`` if the other end is gone, or talks nonsense."""
        try:
            data, attached, _, _ = self._read()
        except ConnectionError:
            return None
        if not data:
            return None
        fds = tuple(fd for _, _, some in attached for fd in struct.unpack(f"{len(some) // 4}i", some))
        try:
            return _message(data, fds)
        except (ValueError, OSError):
            for fd in fds:
                os.close(fd)
            return None

    def _read(self) -> tuple[bytes, list[tuple[int, int, bytes]], int, Any]:
        try:
            return self._socket.recvmsg(_INLINE + HEADER_SIZE, _ROOM, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:  # it has left with something unread: once, before what it had said itself
            return self._socket.recvmsg(_INLINE + HEADER_SIZE, _ROOM, socket.MSG_CMSG_CLOEXEC)

    def close(self) -> None:
        """Close the line; harmless when repeated."""
        if self._socket.fileno() >= 0:
            end(self._socket, self._opener)
            os.close(self.pidfd)


class Listener:
    """The sender's open door."""

    def __init__(self) -> None:
        name = secrets.token_hex(16).encode()
        self.endpoint = Endpoint(b"\0wsync-" + name, secrets.token_bytes(TOKEN))
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        door.bind(self.endpoint.address)
        door.listen(socket.SOMAXCONN)
        self._lobby = Lobby(door, self._admit)

    def fileno(self) -> int:
        """Readable when somebody is at the door."""
        return self._lobby.fileno()

    def accept(self) -> tuple[Line, Message] | None:
        """Who has shown the token; ``None`` if nobody has, yet. Waits for nobody."""
        return self._lobby.accept()

    def _admit(self, visitor: Visitor) -> tuple[LocalLine, Message]:
        if _peer_of(visitor.socket)[1] != os.getuid():
            raise ValueError("another user")
        visitor.heard += visitor.socket.recv(HEADER_SIZE + TOKEN)  # descriptors that came with it are dropped
        hello = greeting(visitor, TOKEN, partial(secrets.compare_digest, self.endpoint.token))
        if hello is None:
            raise ValueError("half a greeting")
        visitor.socket.setblocking(True)
        try:
            return LocalLine(visitor.socket), hello
        except NotConnected as error:
            raise ValueError("it has died") from error

    def close(self) -> None:
        """Shut the door; harmless when repeated."""
        self._lobby.close()


def _peer_of(sock: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end, as the kernel knows them."""
    pid, uid, _ = struct.unpack("iii", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def _message(data: bytes, fds: tuple[int, ...]) -> Message:
    """The message in ``data``, or in the last of ``fds``.

    Raises:
        ValueError, OSError: there is none.
    """
    message = unpack(data, fds=fds)
    length = length_in(data)
    if not length & _ATTACHED:
        if length != len(message.payload):
            raise ValueError("a message that is not as long as it says")
        return message
    length &= ~_ATTACHED
    if not fds or not length <= min(_MOST, os.fstat(fds[-1]).st_size):
        raise ValueError("a long message without its memory file")
    payload = os.pread(fds[-1], length, 0)
    os.close(fds[-1])
    return message._replace(payload=payload, fds=fds[:-1])


def knock(endpoint: Endpoint, worker: int, deadline: float | None) -> LocalLine:
    """Connect to a sender as worker ``worker``.

    Raises:
        NotConnected: no sender listens there (any more).
        SyncTimeout: so many have knocked, and so long nobody was let in, that there was no room at the door.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _time_until(deadline))
        sock.connect(endpoint.address)
        if _peer_of(sock)[1] != os.getuid():
            raise PermissionError("another user listens there")
        connection = LocalLine(sock)
        connection.send(Message(Kind.HELLO, worker, PROTOCOL, endpoint.token))
    except BlockingIOError:
        sock.close()
        raise SyncTimeout(
            f"worker {worker}: the sender let nobody in, and its door has no room for one more: does it call connect()?"
        ) from None
    except OSError as error:
        sock.close()
        raise NotConnected(f"worker {worker}: the sender is gone, or has been shut down ({error})") from error
    return connection


def _time_until(deadline: float | None) -> bytes:
    """How long that is, as a socket takes it: never 0, which would be no limit."""
    left = milliseconds(deadline)
    return struct.pack("ll", *((0, 0) if left is None else divmod(max(1, int(left)) * 1000, 1_000_000)))
