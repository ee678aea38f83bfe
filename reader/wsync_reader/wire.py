"""A connection to a trainer: its address and key, the handshake and frames, which ``wsync.control`` describes."""

import errno
import hashlib
import hmac
import os
import secrets
import select
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self

import msgspec

from wsync_reader.layout import NotConnected

PROTOCOL = 103  # of all messages: two ends have to be of one revision (``wsync.control.auth``)
_NONCE_SIZE, _PROOF_SIZE, _MAC_SIZE, _LARGEST = 16, 32, 16, 1 << 30  # bytes; the last one in a message
_PATIENCE = 10  # seconds for the kernel to send or connect, and after which a machine that is silent is given up
_OF_TCP = {socket.TCP_KEEPIDLE: 3, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 4, socket.TCP_NODELAY: 1}
_OF_TCP[socket.TCP_USER_TIMEOUT] = 1000 * _PATIENCE


class Address(msgspec.Struct, frozen=True):
    """Where a trainer listens: its host and port, or the abstract name of its Unix socket; and the key."""

    host: str = ""
    port: int = 0
    unix: str = ""
    key: bytes = b""

    @classmethod
    def of(cls, where: str, key: str = "") -> Self:
        """Parse ``tcp://host:port``, or a scheme's ``address``. ValueError: it is neither; NotConnected: no key."""
        if not where.startswith("tcp://"):
            try:
                return msgspec.json.decode(where, type=cls)
            except msgspec.MsgspecError as error:
                raise ValueError("this is not the address of a trainer") from error
        host, _, port = where.removeprefix("tcp://").rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"the address of a trainer is tcp://HOST:PORT, not {where!r}")
        if not (secret := key or os.environ.get("WSYNC_AUTHKEY")):
            raise NotConnected("there is no key: set WSYNC_AUTHKEY to the same secret here and in the trainer")
        return cls(host.strip("[]"), int(port), "", hashlib.sha256(secret.encode()).digest())

    @property
    def public(self) -> bytes:
        """What both ends know of the address; their MACs cover it."""
        return (f"{self.host.partition('%')[0]} {self.port}" if self.port else self.unix).encode()

    def __str__(self) -> str:
        return f"{self.host} port {self.port}" if self.port else "this machine"

    __repr__ = __str__  # without the key

    def connect(self, deadline: float | None) -> socket.socket:
        """Connect by the Unix socket if the trainer is on this machine, else by TCP; OSError: nobody listens there."""
        sock = socket.socket(socket.AF_UNIX)
        if error := sock.connect_ex(b"\0" + self.unix.encode()) if self.unix else errno.ECONNREFUSED:
            sock.close()
            if not self.port:
                raise OSError(error, os.strerror(error))
            patience = _PATIENCE if deadline is None else max(0.001, deadline - time.monotonic())
            sock = socket.create_connection((self.host, self.port), patience)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _OF_TCP.items():
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.settimeout(_PATIENCE)
        return sock


class Link:
    """An authenticated connection. While its thread waits, it calls ``on_wake`` if ``waker`` is readable.

    OSError, of all methods: the connection has ended; TimeoutError: no answer before ``deadline``.
    """

    def __init__(self, sock: socket.socket, waker: int, deadline: float | None, on_wake: Callable[[], None]) -> None:
        self.deadline = deadline
        self._socket, self._waker, self._on_wake = sock, waker, on_wake
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(waker, select.POLLIN)
        self._sent = self._received = 0

    def greet(self, model: str, worker: int, address: Address) -> None:
        """Prove the key, and wait until the trainer accepts this worker; NotConnected: it does not."""
        hello = {"purpose": "weights", "name": model, "worker": worker, "inline": True, "protocol": PROTOCOL}
        body = msgspec.msgpack.encode({**hello, "nonce": secrets.token_bytes(_NONCE_SIZE)})
        said, text = b"\0" + self.read(_NONCE_SIZE) + body + address.public, b""

        def mac(role: bytes, more: bytes = b"") -> bytes:
            return hmac.digest(address.key, b"wsync " + role + said + more, "sha256")

        self._socket.sendall(len(body).to_bytes(2, "little") + mac(b"worker") + body)
        status = self.read(1 + _PROOF_SIZE)
        if refused := not status[0]:
            text = self.read(int.from_bytes(self.read(2), "little"))
        if not hmac.compare_digest(status[1:], mac(b"trainer", text)):
            raise NotConnected(f"worker {worker}: the listener at {address} did not prove the sender's key")
        if refused:
            raise NotConnected(f"worker {worker}: rejected by the sender: {text.decode(errors='replace')}")
        self._send_key, self._receive_key = mac(b"frames of the worker"), mac(b"frames of the trainer")

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message."""
        body = msgspec.msgpack.encode({"type": kind, **fields})
        self._sent += 1
        self._socket.sendall(len(body).to_bytes(4, "little") + _mac(self._send_key, self._sent, body) + body)

    def receive(self) -> SimpleNamespace:
        """Return the next message: its ``type`` and fields, which ``wsync.control.wire`` documents."""
        head = self.read(4 + _MAC_SIZE)
        length = int.from_bytes(head[:4], "little")
        if length > _LARGEST:
            raise ConnectionError(f"the other end has announced a message of {length} bytes: too many")
        body = self.read(length)
        self._received += 1
        if not hmac.compare_digest(_mac(self._receive_key, self._received, body), head[4:]):
            raise ConnectionError("a message without the key of this connection")
        return SimpleNamespace(**msgspec.msgpack.decode(body, type=dict[str, Any]))

    def read(self, size: int) -> bytes:
        """Return exactly ``size`` bytes."""
        self.read_into(memoryview(memory := bytearray(size)))
        return bytes(memory)

    def read_into(self, memory: memoryview) -> None:
        """Fill ``memory``."""
        while memory:
            left = None if self.deadline is None else max(0.0, 1000 * (self.deadline - time.monotonic()))
            ready = dict(self._poll.poll(left))
            if not ready:
                raise TimeoutError("no answer in time")
            if self._waker in ready:
                self._on_wake()
            if self._socket.fileno() in ready:
                if not (got := self._socket.recv_into(memory)):
                    raise ConnectionError("closed by the other end")
                memory = memory[got:]


def _mac(key: bytes, number: int, body: bytes) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little") + body, key=key, digest_size=_MAC_SIZE).digest()
