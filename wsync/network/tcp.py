"""How processes meet over a network: a TCP socket, to an address that the sender chose and told.

The same words as on one machine (``rendezvous.py``), without descriptors. Loopback unless somebody says otherwise, a
port that the system chose, and a random token that both must know (``credentials.py``). The end of a process closes its
socket, and so wakes every wait; where a socket may outlive its process in a child that inherited it, a process
descriptor of the other end helps, if it runs on this machine. A machine that vanishes is noticed within some ten
seconds by TCP's own probes.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from wsync.deadlines import NOW, remaining, wait_readable
from wsync.errors import NotConnected
from wsync.network.credentials import CLAIM, holds, new_claim, proof_for
from wsync.network.listening import listen_on
from wsync.receiving.receiver_thread import LineHandler, receiver_thread
from wsync.wire.identity import PeerProcess, identity
from wsync.wire.lobby import TOKEN, Lobby, Visitor, greeting, missing
from wsync.wire.sockets import Outbox, end, require_opener
from wsync.wire.words import HEADER_SIZE, PROTOCOL, Kind, Line, Message, length_in, unpack

_FRAME_TIMEOUT = 5.0  # seconds in which a begun message has to go on
_MOST = 1 << 30  # bytes of one message; a longer one is a stranger's
_STEP = 1 << 20  # bytes: memory is taken as they come, not as they are announced
_PROBES = (
    (socket.TCP_KEEPIDLE, 4),
    (socket.TCP_KEEPINTVL, 2),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 10_000),
)


@dataclass(frozen=True, slots=True)
class NetEndpoint:
    """Where a sender listens, and what a worker must know to be let in. Travels in a pickled scheme."""

    host: str
    port: int
    token: bytes

    @property
    def where(self) -> bytes:
        """The address, as credentials have it."""
        return f"{self.host} {self.port}".encode()


class NetLine:
    """One end of the line between a sender and one worker (a ``Line``).

    Args:
        sock: is owned by the line.
        proof: goes before the first message.
        expected: has to come before the first message, and after it who the other end is.
    """

    def __init__(self, sock: socket.socket, *, proof: bytes = b"", expected: bytes = b"") -> None:
        self._socket = sock
        self._opener = os.getpid()
        self._proof = proof
        self._expected = expected
        self._peer = PeerProcess()
        self._outbox = Outbox(self._send)
        host, port, *_ = sock.getpeername()
        self._where = f"{host} port {port}"
        sock.settimeout(_FRAME_TIMEOUT)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _PROBES:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def recognise(self, who: bytes) -> None:
        """Take the other end's ``identity``: watch its process, if it runs here."""
        self._peer = PeerProcess(who)

    @property
    def peer(self) -> str:
        """The other process."""
        return f"process {self._peer.pid}" if self._peer.pid >= 0 else self._where

    @property
    def signs(self) -> Sequence[int]:
        """The socket's descriptor, and the process's if it is known."""
        return (self._socket.fileno(), *self._peer.descriptors)

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send one message, whole; a long one later (``Outbox``).

        Raises:
            ConnectionError: the other end is gone, or has stopped reading long ago; or this is a forked child.
        """
        require_opener(self._opener)
        data, self._proof = self._proof + message.pack(), b""
        self._outbox.put(data, long=len(data) > _STEP)

    def _send(self, data: bytes) -> None:
        try:
            for begin in range(0, len(data), _STEP):  # the socket's timeout is for all that is sent at once
                self._socket.sendall(memoryview(data)[begin : begin + _STEP])
        except OSError as error:
            with suppress(OSError):  # it may have ended already
                self._socket.shutdown(socket.SHUT_RDWR)  # after half a message nothing would be understood
            why = "does not read" if isinstance(error, TimeoutError) else f"cannot be reached: {error}"
            raise ConnectionError(f"{self.peer} {why}") from error

    def call(self, message: Message) -> None:
        """Send a message without payload."""
        self.send(message)

    def receive(self) -> Message | None:
        """The next message, once the descriptor is readable; None if the other end is gone, or talks nonsense.

        Raises:
            NotConnected: before the first message there was something else than the proof that is expected.
        """
        try:
            if self._expected:
                self._prove()
            header = self._socket.recv(HEADER_SIZE)
            header += self._more(HEADER_SIZE - len(header))
            size = length_in(header)
            if size > _MOST - HEADER_SIZE:
                return None
            return unpack(header, self._more(size))
        except (OSError, ValueError):
            return None

    def readable(self) -> bool:
        """Whether ``receive`` says something, now."""
        descriptor = self._socket.fileno()
        return descriptor < 0 or bool(wait_readable([descriptor], NOW))

    def peek(self) -> Message | None:
        """The next message, if all of it is there, and has no payload; it stays there.

        To ``receive`` it then is one call: a signal strikes before it, or when the message has gone.
        """
        if self._expected or not self.readable():
            return None
        try:
            header = self._socket.recv(HEADER_SIZE, socket.MSG_PEEK)
            return unpack(header, b"") if len(header) == HEADER_SIZE and not length_in(header) else None
        except (OSError, ValueError) as error:  # it was closed just now, or this is nonsense: ``receive`` says so
            if isinstance(error, OSError) and error.errno is None:
                raise  # a signal handler's
            return None

    def _prove(self) -> None:
        shown, self._expected, expected = self._more(len(self._expected)), b"", self._expected
        if not hmac.compare_digest(shown, expected):
            raise NotConnected(f"whoever listens at {self._where} is not this run's sender: it does not know the token")
        self.recognise(self._more(int.from_bytes(self._more(2), "little")))

    def _more(self, count: int) -> bytes:
        """So many bytes; none, if that is less than one.

        Raises:
            ConnectionError: the line ends before.
        """
        parts: list[bytes] = []
        while count > 0:
            parts.append(self._socket.recv(min(count, _STEP)))
            if not parts[-1]:
                raise ConnectionError("the other end is gone")
            count -= len(parts[-1])
        return b"".join(parts)

    def attach(self, receiver: LineHandler) -> None:
        """Have the process's thread call ``receiver``, also when the other end dies."""
        receiver_thread().listen(self, receiver)

    def detach(self, receiver: LineHandler) -> None:
        """No more; return when no such call is under way, unless this is one."""
        receiver_thread().unregister(receiver)

    def alive(self) -> bool:
        """The thread is told of a death."""
        return True

    def close(self) -> None:
        """Close the line; harmless when repeated."""
        if self._socket.fileno() >= 0:
            end(self._socket, self._opener)
            self._peer.close()
            if os.getpid() == self._opener:  # a forked child has no thread
                self._outbox.close()


class NetListener:
    """The sender's open door (a ``Door``).

    Args:
        host: the address to listen on.

    Raises:
        NotConnected: this machine has no such address.
    """

    def __init__(self, host: str) -> None:
        door = listen_on(host)
        self.endpoint = NetEndpoint(host, door.getsockname()[1], secrets.token_bytes(TOKEN))
        self._lobby = Lobby(door, self._admit)
        self._claims: set[bytes] = set()  # that were admitted: one that comes again was overheard

    def fileno(self) -> int:
        """Readable when somebody is at the door."""
        return self._lobby.fileno()

    def accept(self) -> tuple[Line, Message] | None:
        """Who has shown the token; None if nobody has, yet. Waits for nobody."""
        return self._lobby.accept()

    def _admit(self, visitor: Visitor) -> tuple[NetLine, Message] | None:
        part = visitor.socket.recv(missing(visitor))
        if not part:
            raise ConnectionError("it is gone")
        visitor.heard += part
        token, where = self.endpoint.token, self.endpoint.where
        hello = greeting(visitor, CLAIM, partial(holds, token=token, where=where))
        if hello is None:
            return None
        claim = bytes(visitor.heard[HEADER_SIZE : HEADER_SIZE + CLAIM])
        if claim in self._claims:
            raise ValueError("this claim has been made before")
        self._claims.add(claim)
        own = identity()
        proof = proof_for(claim, token, where) + struct.pack("<H", len(own)) + own
        line = NetLine(visitor.socket, proof=proof)
        line.recognise(hello.payload)
        return line, hello

    def close(self) -> None:
        """Shut the door; harmless when repeated."""
        self._lobby.close()


def dial(endpoint: NetEndpoint, worker: int, deadline: float | None) -> NetLine:
    """Connect to a sender as worker ``worker``.

    Raises:
        NotConnected: no sender listens there (any more), or it cannot be reached.
    """
    try:
        sock = socket.create_connection((endpoint.host, endpoint.port), timeout=remaining(deadline))
        claim = new_claim(endpoint.token, endpoint.where)
        line = NetLine(sock, expected=proof_for(claim, endpoint.token, endpoint.where))
        line.send(Message(Kind.HELLO, worker, PROTOCOL, claim + identity()))
    except OSError as error:
        where = f"{endpoint.host} port {endpoint.port}"
        raise NotConnected(
            f"worker {worker}: the sender at {where} is gone, has been shut down, or cannot be reached ({error})"
        ) from error
    return line
