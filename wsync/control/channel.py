"""Connections that block, for those that have a thread for them: a collector's, beside those of its schemes.

The first contact runs in the control thread (``listen.py``); from then on the socket belongs to its user. Each frame is
authenticated, so its content may be a pickle.
"""

from __future__ import annotations

import hmac
import os
import queue
import socket
import struct
from contextlib import suppress

from wsync.control.auth import Address, Hello, new_key
from wsync.control.listen import Contact, Listener, dial
from wsync.control.loop import ControlLoop, control_loop
from wsync.control.processes import pidfd_of
from wsync.control.wire import MAC_SIZE, frame_mac
from wsync.deadlines import readable

_HEAD = struct.Struct(f"<Q{MAC_SIZE}s")
_BODY = struct.Struct("<ii")
_LARGEST = 1 << 34  # bytes in a frame


class Channel:
    """One end of a connection; one thread at a time uses it.

    What one end sends, and the other receives, is a frame: a ``kind`` and a ``number``, which only they interpret, and
    bytes.

    Attributes:
        local: whether both ends are on one machine (a Unix socket).
        process: a descriptor that is readable when the other end's process has ended; -1 if it is elsewhere.
    """

    def __init__(self, contact: Contact) -> None:
        self._socket, self._opener = contact.sock, os.getpid()
        self._socket.setblocking(True)
        self.local = self._socket.family == socket.AF_UNIX
        self._send_key, self._receive_key = contact.frame_keys()
        self._sent = self._received = 0
        self.process = pidfd_of(contact.pid)

    def fileno(self) -> int:
        """Return the descriptor that is readable when ``receive`` has something to return."""
        return self._socket.fileno()

    def set_limit(self, seconds: float) -> None:
        """Have ``send`` and ``receive`` raise ConnectionError if nothing moves for so long: the other end stopped."""
        self._socket.settimeout(seconds)

    def send(self, kind: int, number: int, payload: bytes | bytearray | memoryview = b"") -> None:
        """Send a frame; return when the kernel has it. ConnectionError: the other end is gone."""
        self._sent += 1
        head, payload = _BODY.pack(kind, number), memoryview(payload).cast("B")
        mac = frame_mac(self._send_key, self._sent, head, payload)
        try:
            self._socket.sendall(_HEAD.pack(len(payload), mac) + head)
            self._socket.sendall(payload)
        except OSError as error:
            raise ConnectionError(f"the other end is gone: {error}") from error

    def receive(self) -> tuple[int, int, bytearray]:
        """Wait for a frame, and return its kind, its number and its bytes.

        ConnectionError: the other end is gone, or what came is not from it.
        """
        size, mac = _HEAD.unpack(self._read(_HEAD.size))
        if size > _LARGEST:
            raise ConnectionError(f"the other end has announced {size} bytes: too many")
        head, payload = self._read(_BODY.size), self._read(size)
        self._received += 1
        if not hmac.compare_digest(mac, frame_mac(self._receive_key, self._received, head, payload)):
            raise ConnectionError("a message without the key of this connection")
        kind, number = _BODY.unpack(head)
        return kind, number, payload

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        left = memoryview(data)
        while left:
            try:
                got = self._socket.recv_into(left)
            except OSError as error:
                raise ConnectionError(f"the other end is gone: {error}") from error
            if not got:
                raise ConnectionError("the other end is gone")
            left = left[got:]
        return data

    def close(self) -> None:
        """Close this end; a call of another thread ends with ``ConnectionError``. Idempotent."""
        if os.getpid() == self._opener:  # a forked child has a copy of the parent's
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self.process >= 0:
            os.close(self.process)
            self.process = -1


class ChannelListener:
    """Accepts channels at its ``address``, which has the key.

    Both ends name the same ``purpose`` and ``name``, and have the same ``key`` (by default a random one). ``host``,
    ``port``: as in ``listen_on``, which raises NotConnected; without a host only this machine's processes can connect.
    """

    def __init__(
        self, purpose: str, name: str = "", host: str | None = None, port: int = 0, key: bytes | None = None
    ) -> None:
        self._arrived = queue.SimpleQueue[tuple[Channel, Hello]]()
        self._listener = Listener(key or new_key(), purpose, name, host, port)
        self._event, self._signal = os.pipe()  # not an eventfd, which a container may block
        self._loop: ControlLoop | None = control_loop().acquire()
        self._loop.post(self._listener.start, self._welcome)
        self.address = self._listener.address

    async def _welcome(self, contact: Contact) -> None:
        await contact.accept()
        self._arrived.put((Channel(contact), contact.hello))
        os.write(self._signal, b"1")

    async def _close(self) -> None:
        self._listener.close()

    def fileno(self) -> int:
        """Return the descriptor that is readable when ``accept`` has something to return."""
        return self._event

    def accept(self, deadline: float | None = 0.0) -> tuple[Channel, Hello] | None:
        """Return a connection, and what its other end says of itself; None if none came before the deadline."""
        if not readable([self._event], deadline):
            return None
        os.read(self._event, 1)
        return self._arrived.get()

    def close(self) -> None:
        """Stop listening, and close what was not accepted. Idempotent."""
        loop, self._loop = self._loop, None
        if loop is None or loop.inherited:
            return
        loop.call(self._close())
        loop.release()
        while not self._arrived.empty():
            self._arrived.get()[0].close()
        os.close(self._event)
        os.close(self._signal)


def connect_channel(
    address: Address, purpose: str, worker: int, deadline: float | None, *, name: str = "", payload: bytes = b""
) -> Channel:
    """Connect to a ``ChannelListener`` with the same purpose and name, until a deadline on ``time.monotonic``'s clock.

    Its ``accept`` returns this end's index ``worker``, and up to about a kilobyte of ``payload``, in the ``Hello``.
    NotConnected: nothing listens there (any more), or this end was refused. SyncTimeout: no answer by the deadline.
    """
    loop = control_loop().acquire()
    try:
        return Channel(loop.call(dial(address, Hello(purpose, name, worker, payload=payload), deadline)))
    finally:
        loop.release()
