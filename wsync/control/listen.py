"""First contact: a listener that never waits for a stranger, and a worker's way to it. Both run in the control thread.

Until a connection has proved that it has the key, it costs one descriptor and at most ``MAX_HELLO`` bytes. It is closed
if it has not done so after five seconds, or after one second, if it is the oldest of 64 and another one comes.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from wsync.control.auth import MAX_HELLO, NONCE_SIZE, PROOF_SIZE, PROTOCOL, Address, Hello, proof_of
from wsync.control.wire import Link, SocketStream
from wsync.deadlines import remaining
from wsync.errors import NotConnected, SyncTimeout

_HEAD = struct.Struct("<H")
_PATIENCE, _GRACE, _MAX_STRANGERS = 5.0, 1.0, 64
_PAUSE = 0.1  # seconds without ``accept``, when there is no room for one more
_REFUSED, _ACCEPTED = b"\0", b"\1"
_MAX_FDS = 8
_SILENCE = 10  # seconds after which a TCP connection to a machine that does not answer is ended
KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3), (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
]
"""The options of a socket by which a wait ends some ten seconds after the other machine has vanished."""


@dataclass
class Contact:
    """One end of an authenticated connection."""

    sock: socket.socket
    hello: Hello
    end: str  # "trainer", where the worker waits to be accepted, or "worker", which was
    pid: int  # of the other end, as the kernel reports it; 0 if it is on another machine
    _key: bytes = field(repr=False)
    _said: bytes  # what the proofs cover
    fds: Sequence[int] = ()  # that the trainer has passed to the worker

    def __post_init__(self) -> None:
        if self.sock.family != socket.AF_UNIX:
            for option in KEEPALIVE:
                self.sock.setsockopt(*option)

    @property
    def where(self) -> str:
        """The other end, for people: its process; on another machine, its address. OSError: it has gone."""
        return f"pid {self.pid}" if self.pid else ":".join(map(str, self.sock.getpeername()[:2]))

    async def accept(self, fds: Sequence[int] = ()) -> None:
        """Trainer: accept the worker, and give it descriptors (only by a Unix socket)."""
        proof = _ACCEPTED + proof_of("trainer", self._key, self._said)
        if fds:
            socket.send_fds(self.sock, [proof], list(fds))
        else:
            await asyncio.get_running_loop().sock_sendall(self.sock, proof)

    async def refuse(self, why: str) -> None:
        """Trainer: tell the worker why it is not accepted."""
        text = why.encode()[:4096]
        answer = _REFUSED + proof_of("trainer", self._key, self._said + text) + _HEAD.pack(len(text)) + text
        with suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(self.sock, answer)
        self.sock.close()

    def frame_keys(self) -> tuple[bytes, bytes]:
        """Return the keys of the frames that are sent, and received."""
        trainers, workers = (proof_of(f"frames of the {role}", self._key, self._said) for role in ("trainer", "worker"))
        return (trainers, workers) if self.end == "trainer" else (workers, trainers)

    async def link(self) -> Link:
        """Return the connection for messages."""
        loop = asyncio.get_running_loop()
        if self.sock.family == socket.AF_UNIX:
            _, stream = await loop.create_unix_connection(SocketStream, sock=self.sock)
        else:
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE * 1000)
            _, stream = await loop.create_connection(SocketStream, sock=self.sock)
        return Link(stream, self.end, self.frame_keys())


def listen_on(host: str, port: int = 0) -> socket.socket:
    """Return a TCP socket that listens on one address of this machine, at a port, or (0) any free one.

    NotConnected: this machine has no such address, it is a wildcard such as 0.0.0.0, or the port is taken.
    """
    if not host:
        raise NotConnected("host is empty: it has to be an address of this machine, by which workers reach it")
    where = f"host={host}" + (f" port {port}" if port else "")
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if place[0] in ("0.0.0.0", "::"):
            raise NotConnected(f"host={host} is every interface: name one address of this machine instead")
        return socket.create_server(place, family=family, backlog=socket.SOMAXCONN)
    except OSError as error:
        raise NotConnected(f"cannot listen on {where}, which has to be an address of this machine: {error}") from error


class Listener:
    """Where workers connect: a Unix socket for this machine and, with a host, a TCP socket (see ``listen_on``).

    ``key`` is the secret; a ``Hello`` has to name ``purpose`` and ``name``.
    """

    def __init__(self, key: bytes, purpose: str, name: str, host: str | None = None, port: int = 0) -> None:
        self._purpose, self._name = purpose, name
        self._sockets: list[socket.socket] = []
        self._strangers: dict[socket.socket, tuple[asyncio.Task[None], float]] = {}  # with the times of their arrival
        self._welcome: Callable[[Contact], Awaitable[None]] | None = None
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

    def start(self, welcome: Callable[[Contact], Awaitable[None]]) -> None:
        """Begin to accept; those that have come before wait in the kernel. Called in the control thread, also again.

        ``welcome`` is called in a task for each worker.
        """
        self._welcome = welcome
        for sock in self._sockets:
            sock.setblocking(False)
            self._watch(sock)

    def _watch(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listening, self._on_connection, listening)

    def _on_connection(self, listening: socket.socket) -> None:
        oldest = next(iter(self._strangers)) if len(self._strangers) >= _MAX_STRANGERS else None
        try:
            if oldest is not None and time.monotonic() < self._strangers[oldest][1] + _GRACE:
                raise BlockingIOError("too many strangers")
            sock, _ = listening.accept()
        except OSError:  # too many strangers, or no descriptor is left: those that connect wait in the kernel
            loop = asyncio.get_running_loop()
            loop.remove_reader(listening)
            loop.call_later(_PAUSE, self._watch, listening)
            return
        if oldest is not None:
            self._strangers[oldest][0].cancel()
        sock.setblocking(False)
        self._strangers[sock] = asyncio.ensure_future(self._greet(sock)), time.monotonic()

    async def _greet(self, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(_PATIENCE):
                contact = await self._authenticate(sock)
        except BaseException as error:
            sock.close()
            if isinstance(error, (OSError, ValueError, msgspec.MsgspecError)):
                return  # a stranger, or a worker that has gone
            raise
        finally:
            self._strangers.pop(sock, None)
        try:
            if self._welcome is not None:
                await self._welcome(contact)
        except OSError:  # it has gone meanwhile
            sock.close()

    async def _authenticate(self, sock: socket.socket) -> Contact:
        loop, challenge, address = asyncio.get_running_loop(), secrets.token_bytes(NONCE_SIZE), self.address
        await loop.sock_sendall(sock, challenge)
        head = await _receive(sock, _HEAD.size + PROOF_SIZE)
        (size,) = _HEAD.unpack_from(head)
        if size > MAX_HELLO:
            raise ValueError("not a worker")
        body = await _receive(sock, size)
        said = challenge + body + address.public
        if not hmac.compare_digest(head[_HEAD.size :], proof_of("worker", address.key, said)):
            raise ValueError("wrong key")
        hello = msgspec.msgpack.decode(body, type=Hello)
        contact = Contact(sock, hello, "trainer", peer_pid(sock), address.key, said)
        ours = (PROTOCOL, self._purpose, self._name)
        theirs = (hello.protocol, hello.purpose, hello.name)
        if theirs != ours:
            await contact.refuse(f"this end is for {ours}, that worker asks for {theirs} (protocol, purpose, name)")
            raise ValueError("another name")
        return contact

    def close(self) -> None:
        """Stop listening, in the control thread. Idempotent."""
        loop = asyncio.get_running_loop()
        for sock, (task, _) in self._strangers.items():
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
        self._welcome = None  # it refers to what has this listener


async def dial(address: Address, hello: Hello, deadline: float | None) -> Contact:
    """Connect to a listener, and wait until it accepts this worker.

    NotConnected: no sender is there (any more), or it has refused this worker. SyncTimeout: no answer in time.
    """
    worker, where = f"worker {hello.worker}", f" at {address.host} port {address.port}" if address.host else ""
    body, text = msgspec.msgpack.encode(hello), b""
    with ExitStack() as opened:
        try:
            async with asyncio.timeout(remaining(deadline)):
                sock = await _open(address, opened)
                said = await _receive(sock, NONCE_SIZE) + body + address.public
                first = _HEAD.pack(len(body)) + proof_of("worker", address.key, said) + body
                await asyncio.get_running_loop().sock_sendall(sock, first)
                status, fds = await _receive_with_fds(sock, 1 + PROOF_SIZE)
                refused = status[:1] == _REFUSED
                if refused:
                    (size,) = _HEAD.unpack(await _receive(sock, _HEAD.size))
                    text = await _receive(sock, size)
        except TimeoutError:
            raise SyncTimeout(
                f"{worker}: no answer of the sender{where} in time: has connect() or readmit() been called there?"
            ) from None
        except OSError as error:
            raise NotConnected(
                f"{worker}: the sender{where} has ended, cannot be reached, or was given another key ({error})"
            ) from error
        for fd in fds:
            opened.callback(os.close, fd)
        if not hmac.compare_digest(status[1:], proof_of("trainer", address.key, said + text)):
            raise NotConnected(f"{worker}: the listener{where} did not prove the sender's key")
        if refused:
            raise NotConnected(f"{worker}: rejected by the sender: {text.decode(errors='replace')}")
        opened.pop_all()  # its user closes it
        return Contact(sock, hello, "worker", peer_pid(sock), address.key, said, fds)


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
    place = (address.host, address.port) if "%" in address.host else place  # uvloop loses the scope
    return await _connected(family, place, opened)


async def _connected(family: socket.AddressFamily, place: Any, opened: ExitStack) -> socket.socket:
    sock = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, place)
    return sock


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
