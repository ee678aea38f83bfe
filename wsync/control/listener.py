"""The listening socket of a sender, and the connection attempts that are not authenticated yet.

The listener never blocks on an unauthenticated connection: it reads an attempt only when data has arrived. Until its
credentials are checked, an attempt costs one descriptor and at most a kilobyte. It is closed if its credentials are
invalid, if it is the oldest of more than 64, or if it is older than five seconds (tested by each ``accept`` that
returns no connection).
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import time
import weakref
from contextlib import closing, suppress
from dataclasses import dataclass, field

from wsync.control.address import Address
from wsync.control.connection import Connection, close_socket
from wsync.control.credentials import CLAIM_SIZE, is_valid, new_token, proof_for
from wsync.control.liveness import EXHAUSTED, own_identity, peer_of
from wsync.control.messages import HEADER_SIZE, MAX_HELLO, Kind, Message, payload_length, unpack
from wsync.errors import NotConnected

_AUTH_TIMEOUT = 5.0  # seconds in which an attempt must send its credentials
_MAX_PENDING = 64  # unauthenticated attempts at a time
_CLAIM_END = HEADER_SIZE + CLAIM_SIZE  # where the claim of a HELLO ends, and the worker's identity begins


@dataclass(slots=True)
class _Pending:
    """An unauthenticated connection attempt: when the listener closes it, and what it has sent so far."""

    socket: socket.socket
    until: float
    received: bytearray = field(default_factory=bytearray)


def listen_on(host: str, port: int = 0) -> socket.socket:
    """Return a TCP socket that listens on one address of this machine.

    Args:
        host: an address of this machine, by which workers reach it; not a wildcard such as 0.0.0.0.
        port: 0 for any free one.

    Raises:
        NotConnected: this machine has no such address, it is a wildcard, or the port is taken.
    """
    if not host:
        raise NotConnected("host is empty: it has to be an address of this machine, by which workers reach it")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    where = f"host={host}" + (f" port {port}" if port else "")
    try:
        addresses = {address[0] for *_, address in socket.getaddrinfo(host, port, family)}
        if addresses & {"0.0.0.0", "::"}:
            raise NotConnected(f"host={host} is every interface: name one address of this machine instead")
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise NotConnected(f"cannot listen on {where}, which has to be an address of this machine: {error}") from error


class Listener:
    """A sender's listening socket, which returns authenticated connections.

    One thread at a time calls ``accept``: for a scheme, the thread in ``connect`` or ``readmit``, with the channel's
    lock. Any thread may call ``close``.

    Args:
        host: the address to listen on, by TCP; None for a Unix socket with an abstract name, which only processes of
            the same user on this machine can use.
        port: 0 for any free one.
        token: the secret; a new random one if it is not given.

    Raises:
        NotConnected: see ``listen_on``.
    """

    def __init__(self, host: str | None = None, port: int = 0, token: bytes | None = None) -> None:
        if host is not None:
            self._socket = listen_on(host, port)
            port_or_name: int | str = self._socket.getsockname()[1]
        else:
            port_or_name = f"wsync-{secrets.token_hex(16)}"
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.bind(b"\0" + port_or_name.encode())
            self._socket.listen(socket.SOMAXCONN)
        self.address = Address(host or "", port_or_name, token or new_token())
        self._opener = os.getpid()
        self._pending: dict[int, _Pending] = {}
        self._used: set[bytes] = set()  # replay protection: a claim is accepted once
        # epoll, because ``fileno`` returns one descriptor for all sockets. Each socket is unregistered before it is
        # closed: otherwise it would stay in the set while a forked child has it open.
        self._epoll = select.epoll()
        self._socket.setblocking(False)
        self._epoll.register(self._socket.fileno(), select.EPOLLIN)
        self._finalizer = weakref.finalize(self, _close, self._socket, self._epoll, self._pending, self._opener)
        self._finalizer.atexit = False

    @property
    def passes_descriptors(self) -> bool:
        """Whether connections can carry open descriptors (Unix sockets)."""
        return not self.address.host

    def fileno(self) -> int:
        """Return a descriptor that is readable when ``accept`` has something to do; -1 once closed."""
        return -1 if self._epoll.closed else self._epoll.fileno()

    def accept(self) -> tuple[Connection, Message] | None:
        """Return an authenticated connection and its ``HELLO``, if there is one; never waits.

        The payload of the message is what the worker gave to ``connect``.
        """
        ready, own = {fd for fd, _ in self._epoll.poll(0)}, self._socket.fileno()
        for fd in ready - {own}:
            if (accepted := self._read(fd)) is not None:
                return accepted
        if own in ready:  # last: a new socket may get the number of one in `ready` that was closed just now
            fd = self._add_pending()
            if fd >= 0 and (accepted := self._read(fd)) is not None:  # its HELLO has usually arrived as well
                return accepted
        for fd in [fd for fd, pending in self._pending.items() if pending.until < time.monotonic()]:
            self._drop(fd)
        return None

    def _add_pending(self) -> int:
        """Accept a connection attempt; return its descriptor, -1 if it has ended already."""
        if len(self._pending) == _MAX_PENDING:
            self._drop(next(iter(self._pending)))  # the oldest
        try:
            sock, _ = self._socket.accept()
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise
            return -1  # an error of the network, or the client has disconnected already: see accept(2)
        sock.setblocking(False)
        self._pending[sock.fileno()] = _Pending(sock, time.monotonic() + _AUTH_TIMEOUT)
        self._epoll.register(sock.fileno(), select.EPOLLIN)
        return sock.fileno()

    def _read(self, fd: int) -> tuple[Connection, Message] | None:
        try:
            accepted = self._authenticate(self._pending[fd])
        except BlockingIOError:  # the rest has not arrived yet
            return None
        except (ValueError, OSError) as error:  # wrong credentials, or the client has disconnected
            self._drop(fd)
            if isinstance(error, OSError) and error.errno in EXHAUSTED:
                raise
            return None
        except BaseException:  # e.g. no thread could be started to watch it
            self._drop(fd)
            raise
        self._epoll.unregister(fd)
        del self._pending[fd]
        return accepted

    def _authenticate(self, pending: _Pending) -> tuple[Connection, Message]:
        """Read what has arrived of the ``HELLO``; return the connection once it is complete.

        Everything that has arrived is read: otherwise the time limit could close a connection although all of its
        ``HELLO`` has arrived.

        Raises:
            BlockingIOError: more has to arrive.
            ValueError, OSError: it is no ``HELLO``, the credentials are wrong, or the client has disconnected.
        """
        received = pending.received
        while not self._is_complete(received):
            header_only = len(received) < HEADER_SIZE
            wanted = HEADER_SIZE if header_only else HEADER_SIZE + payload_length(received)
            part = pending.socket.recv(wanted - len(received))  # never more than the HELLO
            if not part:
                raise ConnectionError("closed")
            received += part
        claim, rest = bytes(received[HEADER_SIZE:_CLAIM_END]), bytes(received[_CLAIM_END:])
        self._used.add(claim)
        size = int.from_bytes(rest[:2], "little")
        identity, payload = rest[2 : 2 + size], rest[2 + size :]
        own = own_identity()
        preamble = proof_for(claim, self.address.token, self.address.public) + struct.pack("<H", len(own)) + own
        connection = Connection(pending.socket, peer_of(pending.socket, identity), preamble=preamble)
        return connection, unpack(received, b"")._replace(payload=payload)

    def _is_complete(self, received: bytearray) -> bool:
        """Return whether a whole ``HELLO`` was received.

        Raises:
            ValueError: it is none, or its credentials are wrong.
        """
        if len(received) < HEADER_SIZE:
            return False
        length = payload_length(received)
        hello = unpack(received, b"")
        if hello.kind is not Kind.HELLO or not CLAIM_SIZE <= length <= MAX_HELLO:
            raise ValueError("not a HELLO")
        if len(received) >= _CLAIM_END:
            claim = bytes(received[HEADER_SIZE:_CLAIM_END])
            if claim in self._used or not is_valid(claim, self.address.token, self.address.public):
                raise ValueError("wrong credentials")
        return len(received) == HEADER_SIZE + length

    def _drop(self, fd: int) -> None:
        # OSError: it is not registered, because a signal handler has raised before.
        with closing(self._pending.pop(fd).socket), suppress(OSError):
            self._epoll.unregister(fd)

    def close(self) -> None:
        """Stop listening and close all pending attempts. Idempotent."""
        self._finalizer.detach()  # and close here: at interpreter exit, calling the finalizer would do nothing
        _close(self._socket, self._epoll, self._pending, self._opener)


def _close(listening: socket.socket, epoll: select.epoll, pending: dict[int, _Pending], opener_pid: int) -> None:
    for attempt in pending.values():
        close_socket(attempt.socket, opener_pid)
    pending.clear()
    epoll.close()
    if os.getpid() == opener_pid:
        with suppress(OSError):  # no client is left in the queue, or the listener was closed before
            listening.shutdown(socket.SHUT_RDWR)
            while True:  # reject queued clients: close() alone leaves them waiting if a forked child has the socket
                close_socket(listening.accept()[0], opener_pid)
    listening.close()
