"""First contact: a listener that never waits for a stranger, and a worker's way to it. Both run in the control thread.

Until a connection has proved that it has the key, it costs one descriptor and at most ``MAX_HELLO`` bytes. It is closed
if it has not done so after five seconds, or after one second, if it is the oldest of 64 and another one comes.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from wsync.control.auth import MAX_HELLO, NONCE_SIZE, PROTOCOL, Address, Hello, frame_keys, mac_of, new_nonce
from wsync.control.wire import Link, SocketStream
from wsync.deadlines import remaining
from wsync.errors import NotConnected, SyncTimeout

_MAC = 32
_HEAD = struct.Struct("<H")
_PATIENCE, _GRACE, _MAX_STRANGERS = 5.0, 1.0, 64
_REFUSED, _ACCEPTED = b"\0", b"\1"
_MAX_FDS = 8
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_SILENCE = 10  # seconds after which a TCP connection to a machine that does not answer is ended


@dataclass
class Visitor:
    """An authenticated connection that was not accepted or refused yet.

    Attributes:
        hello: what the worker says of itself.
        pid: its process, as the kernel reports it; 0 if it is on another machine.
    """

    hello: Hello
    pid: int
    _socket: socket.socket
    _key: bytes
    _challenge: bytes
    _body: bytes

    async def accept(self, fds: Sequence[int] = ()) -> Link:
        """Accept it, and give it descriptors (only by a Unix socket)."""
        sock, keys = await self.accept_socket(fds)
        return Link(await _stream_over(sock), "trainer", keys)

    async def accept_socket(self, fds: Sequence[int] = ()) -> tuple[socket.socket, tuple[bytes, bytes]]:
        """Accept it; return the socket, and the keys of the frames that are sent, and received."""
        proof = _ACCEPTED + mac_of(self._key, "trainer", self._challenge, self._body)
        if fds:
            socket.send_fds(self._socket, [proof], list(fds))
        else:
            await asyncio.get_running_loop().sock_sendall(self._socket, proof)
        return self._socket, frame_keys(self._key, "trainer", self._challenge, self._body)

    async def refuse(self, why: str) -> None:
        """Tell the worker why it is not accepted."""
        text = why.encode()[:4096]
        proof = mac_of(self._key, "trainer", self._challenge, self._body + text)
        with suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(self._socket, _REFUSED + proof + _HEAD.pack(len(text)) + text)
        self._socket.close()

    def drop(self) -> None:
        """Close the connection without a word."""
        self._socket.close()


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
    where = f"host={host}" + (f" port {port}" if port else "")
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if place[0] in ("0.0.0.0", "::"):
            raise NotConnected(f"host={host} is every interface: name one address of this machine instead")
        with ExitStack() as opened:
            sock = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(place)
            sock.listen(socket.SOMAXCONN)
            opened.pop_all()
            return sock
    except OSError as error:
        raise NotConnected(f"cannot listen on {where}, which has to be an address of this machine: {error}") from error


class Listener:
    """Where workers connect: a Unix socket for this machine and, with a host, a TCP socket.

    Args:
        key: the secret.
        purpose, name: what a ``Hello`` has to name.
        host, port: of the TCP socket; no host for none.

    Raises:
        NotConnected: see ``listen_on``.
    """

    def __init__(self, key: bytes, purpose: str, name: str, host: str | None = None, port: int = 0) -> None:
        self._purpose, self._name = purpose, name
        self._sockets: list[socket.socket] = []
        self._strangers: dict[asyncio.Task[None], tuple[socket.socket, float]] = {}  # with the times of their arrival
        self._opener = os.getpid()
        if host is not None:
            self._sockets.append(listen_on(host, port))
            port = self._sockets[0].getsockname()[1]
        unix = f"wsync-{secrets.token_hex(16)}"
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local.bind(b"\0" + unix.encode())
        local.listen(socket.SOMAXCONN)
        self._sockets.append(local)
        self.address = Address(host or "", port if host else 0, unix, key)

    def start(self, welcome: Callable[[Visitor], Awaitable[None]]) -> None:
        """Begin to accept; those that have come before wait in the kernel. Called in the control thread, also again.

        ``welcome`` is called in a task for each worker.
        """
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            sock.setblocking(False)
            loop.add_reader(sock, self._on_connection, sock, welcome)

    def _on_connection(self, listening: socket.socket, welcome: Callable[[Visitor], Awaitable[None]]) -> None:
        if len(self._strangers) == _MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            if time.monotonic() < self._strangers[oldest][1] + _GRACE:
                return self._accept_later(listening, welcome)
            oldest.cancel()
        try:
            sock, _ = listening.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self._accept_later(listening, welcome)
            return
        sock.setblocking(False)
        task = asyncio.ensure_future(self._greet(sock, welcome))
        self._strangers[task] = sock, time.monotonic()
        task.add_done_callback(lambda task: self._strangers.pop(task, None))

    def _accept_later(self, listening: socket.socket, welcome: Callable[[Visitor], Awaitable[None]]) -> None:
        """Leave those that connect to the kernel for a moment."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)

        def go_on() -> None:
            if listening.fileno() >= 0:
                loop.add_reader(listening, self._on_connection, listening, welcome)

        loop.call_later(0.1, go_on)

    async def _greet(self, sock: socket.socket, welcome: Callable[[Visitor], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(_PATIENCE):
                visitor = await self._authenticate(sock)
        except BaseException as error:
            sock.close()
            if isinstance(error, (OSError, TimeoutError, ValueError, msgspec.MsgspecError)):
                return  # a stranger, or a worker that has gone
            raise
        if (task := asyncio.current_task()) is not None:
            self._strangers.pop(task, None)
        del task  # else it and its frame keep each other, and what the connection has
        try:
            await welcome(visitor)
        except (OSError, ConnectionError):  # it has gone meanwhile
            visitor.drop()

    async def _authenticate(self, sock: socket.socket) -> Visitor:
        loop, challenge = asyncio.get_running_loop(), new_nonce()
        await loop.sock_sendall(sock, challenge)
        head = await _receive(sock, _HEAD.size + _MAC)
        (size,) = _HEAD.unpack_from(head)
        if size > MAX_HELLO:
            raise ValueError("not a worker")
        body = await _receive(sock, size)
        public = self.address.public
        if not hmac.compare_digest(head[_HEAD.size :], mac_of(self.address.key, "worker", challenge, body + public)):
            raise ValueError("wrong key")
        hello = msgspec.msgpack.decode(body, type=Hello)
        visitor = Visitor(hello, peer_pid(sock), sock, self.address.key, challenge, body + public)
        ours = (PROTOCOL, self._purpose, self._name)
        theirs = (hello.protocol, hello.purpose, hello.name)
        if theirs != ours:
            await visitor.refuse(f"this end is for {ours}, that worker asks for {theirs} (protocol, purpose, name)")
            raise ValueError("another name")
        return visitor

    def close(self) -> None:
        """Stop listening, in the control thread. Idempotent."""
        loop = asyncio.get_running_loop()
        for task, (sock, _) in self._strangers.items():
            task.cancel()
            sock.close()
        for sock in self._sockets:
            with suppress(ValueError):
                loop.remove_reader(sock)
            if os.getpid() == self._opener:  # close() alone leaves waiting clients if a forked child has the socket
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self._sockets.clear()


async def dial(
    address: Address, purpose: str, name: str, worker: int, deadline: float | None, *, native: bool = False
) -> tuple[Link, int, list[int]]:
    """Connect to a listener, and wait until it accepts this worker.

    Returns:
        The connection, the process id of the other end (0 on another machine), and descriptors that it has passed.

    Raises:
        NotConnected, SyncTimeout: as ``dial_socket``.
    """
    sock, keys, fds = await dial_socket(address, purpose, name, worker, deadline, native=native)
    pid = peer_pid(sock)
    return Link(await _stream_over(sock), "worker", keys), pid, fds


async def dial_socket(
    address: Address,
    purpose: str,
    name: str,
    worker: int,
    deadline: float | None,
    *,
    native: bool = False,
    payload: bytes = b"",
) -> tuple[socket.socket, tuple[bytes, bytes], list[int]]:
    """Connect to a listener, and wait until it accepts this worker.

    Returns:
        The socket, the keys of the frames that are sent and received, and descriptors that the other end has passed.

    Raises:
        NotConnected: no sender is there (any more), or it has refused this worker.
        SyncTimeout: no answer by the deadline.
    """
    where = f" at {address.host} port {address.port}" if address.host else ""
    loop, public = asyncio.get_running_loop(), address.public
    with ExitStack() as opened:
        try:
            async with asyncio.timeout(remaining(deadline)):
                sock = await _open(address, opened)
                challenge = await _receive(sock, NONCE_SIZE)
                hello = Hello(PROTOCOL, purpose, name, worker, new_nonce(), os.getpid(), native, payload)
                body = msgspec.msgpack.encode(hello)
                mac = mac_of(address.key, "worker", challenge, body + public)
                await loop.sock_sendall(sock, _HEAD.pack(len(body)) + mac + body)
                status, fds = await _receive_with_fds(sock, 1 + _MAC)
                refused, text = status[:1] == _REFUSED, b""
                if refused:
                    (size,) = _HEAD.unpack(await _receive(sock, _HEAD.size))
                    text = await _receive(sock, size)
        except TimeoutError:
            raise SyncTimeout(
                f"worker {worker}: the sender{where} did not answer in time: does it call connect() or readmit()?"
            ) from None
        except OSError as error:
            raise NotConnected(
                f"worker {worker}: the sender{where} is gone, has been shut down, or cannot be reached ({error})"
            ) from error
        if not hmac.compare_digest(status[1:], mac_of(address.key, "trainer", challenge, body + public + text)):
            raise NotConnected(f"worker {worker}: what listens{where} does not have the sender's key")
        if refused:
            raise NotConnected(f"worker {worker}: the sender has rejected it: {text.decode(errors='replace')}")
        opened.pop_all()  # its user closes it
        return sock, frame_keys(address.key, "worker", challenge, body + public), fds


async def _open(address: Address, opened: ExitStack) -> socket.socket:
    """Connect by the Unix socket if the sender is on this machine, else by TCP."""
    if address.unix:
        try:
            sock = await _connected(socket.AF_UNIX, b"\0" + address.unix.encode(), opened)
            peer_pid(sock)  # another user's process could have taken the name
            return sock
        except OSError:
            if not address.port:
                raise
    loop = asyncio.get_running_loop()
    family, *_, place = (await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM))[0]
    return await _connected(family, place, opened)


async def _connected(family: socket.AddressFamily, place: Any, opened: ExitStack) -> socket.socket:
    sock = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, place)
    return sock


async def _stream_over(sock: socket.socket) -> SocketStream:
    loop = asyncio.get_running_loop()
    if sock.family == socket.AF_UNIX:
        _, stream = await loop.create_unix_connection(SocketStream, sock=sock)
        return stream
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE * 1000)
    _, stream = await loop.create_connection(SocketStream, sock=sock)
    return stream


async def _receive(sock: socket.socket, size: int) -> bytes:
    data, loop = b"", asyncio.get_running_loop()
    while len(data) < size:
        part = await loop.sock_recv(sock, size - len(data))
        if not part:
            raise ConnectionError("closed by the other end")
        data += part
    return data


async def _receive_with_fds(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    if sock.family != socket.AF_UNIX:
        return await _receive(sock, size), []
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(sock)
    data, fds, *_ = socket.recv_fds(sock, size, _MAX_FDS)
    for fd in fds:
        os.set_inheritable(fd, False)
    if not data:
        raise ConnectionError("closed by the other end")
    return data + await _receive(sock, size - len(data)), fds


def peer_pid(sock: socket.socket) -> int:
    """Return the process id of the other end of a Unix socket; 0 for TCP, and in another PID namespace."""
    if sock.family != socket.AF_UNIX:
        return 0
    pid, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        raise ConnectionError("the other process belongs to another user")
    return pid
