"""What travels between the two ends of a connection, and the connection itself.

A *frame* is its length, a MAC, and one message in msgpack; weights follow a message as plain bytes. The MAC is made
with a key of this connection and this direction (``auth.py``) and counts the frames, so that none can be repeated,
left out or taken from another connection. No message is a pickle; the pickled ``extra_state`` of a model is a field of
one, and so is covered by its MAC.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from msgspec import Meta

MAC_SIZE = 16
_PAUSE = 1 << 16  # bytes that were not read yet, at which a connection takes no more
SMALL, LARGE = 1 << 19, 1 << 30
"""The most bytes in a message of a worker, and in one of a trainer (a layout, an extra state)."""
_Version = Annotated[int, Meta(ge=0, lt=2**40)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages."""


# --- trainer to worker ---


class Settings(Message, frozen=True, tag=True):
    """The first message to an accepted worker, which answers with ``Fits``: how this connection is used."""

    sender: str  # identifies the sender, for ``requires``
    layout: bytes  # empty if no weights have defined it yet
    on_request: bool  # whether the worker fetches versions (``initiator="receiver"``)
    first: int  # the version that ``connect`` of the worker waits for; 0 for none
    arena: tuple[int, int] | None  # how many blocks of words it has, and which one is this connection's
    differences: bool  # whether updates may come as differences to the one before


class NewLayout(Message, frozen=True, tag=True):
    """The layout, where it was not known when the worker connected; another one follows if it does not fit everywhere.

    Each is answered with ``Fits``.
    """

    layout: bytes


class Offer(Message, frozen=True, tag=True):
    """An ``Update``. Its ``size`` bytes follow, or come through the medium."""

    version: int
    size: int
    checksum: int = 0
    extra: bytes = b""
    requires: dict[str, int] = {}
    undecided: bool = False
    base: int = 0  # the version to which a difference is applied; 0 for whole weights
    medium: bool = False  # whether the connection's medium carries it
    slot: int = -1  # in the arena, where it lies, if it is an undecided one that is not carried at all


class Decide(Message, frozen=True, tag=True):
    """Whether an undecided update is committed."""

    version: int
    commit: bool


class Verify(Message, frozen=True, tag=True):
    """Asks which of these tensors are installed with another digest. Answered with ``Fits``; questions are numbered."""

    number: int
    digests: dict[str, int]


class Newest(Message, frozen=True, tag=True):
    """The newest version that can be fetched: it answers all requests up to the number ``answered``."""

    version: int
    answered: int


# --- worker to trainer ---


class Fits(Message, frozen=True, tag=True):
    """The answer to a layout: why weights of it do not fit; empty if they do. Or to ``Verify``: what differs."""

    error: str = ""
    verify: int = 0  # the number of that question
    used: tuple[_Version, Annotated[float, Meta(ge=0)]] | None = None  # with it: what was used last, since (Unix time)


class State(Message, frozen=True, tag=True):
    """What the worker has: the newest version that is ``received``, ``ready`` or ``installed`` there."""

    received: _Version
    ready: _Version = 0
    installed: _Version = 0
    wait: Seconds = 0.0  # from the arrival of the installed version until the gate was free
    apply: Seconds = 0.0  # of the installation

    @property
    def version(self) -> int:
        """The newest of the three."""
        return max(self.received, self.ready, self.installed)


class Refused(Message, frozen=True, tag=True):
    """Why a version did not arrive, does not fit or could not be installed. The model keeps the version that it has.

    ``last``: it had replaced all older versions, so that none of them will be installed any more.
    """

    version: _Version
    error: str
    last: bool


class Fetch(Message, frozen=True, tag=True):
    """Asks for the newest version; requests are numbered."""

    number: int


# --- both ways ---


class Goodbye(Message, frozen=True, tag=True):
    """This end has shut down in order."""


class Side(Message, frozen=True, tag=True):
    """A message of a medium to the same medium at the other end; only media read the fields."""

    number: int = 0
    text: str = ""
    data: bytes = b""


_encoder = msgspec.msgpack.Encoder()
_decoders = {  # by the end that reads
    "worker": msgspec.msgpack.Decoder(Settings | NewLayout | Offer | Decide | Verify | Newest | Goodbye | Side),
    "trainer": msgspec.msgpack.Decoder(Fits | State | Refused | Fetch | Goodbye | Side),
}


class Changes:
    """Wakes the coroutines of one end that wait for a condition: each looks again."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        """Something has changed."""
        self._event.set()
        self._event.clear()  # those that wait now are woken all the same

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds."""
        while not condition():
            await self._event.wait()


class Link:
    """An authenticated connection.

    ``end``: this one, ``"trainer"`` or ``"worker"``. ``keys``: for the MACs of frames that are sent, and received.
    """

    def __init__(self, stream: SocketStream, end: str, keys: tuple[bytes, bytes]) -> None:
        self._stream = stream
        self._decoder = _decoders[end]
        self._limit = LARGE if end == "worker" else SMALL
        self._send_key, self._receive_key = keys
        self._sent = self._received = 0
        self._writing = asyncio.Lock()
        self.host = stream.host
        self.cause: Exception | None = None  # why it has ended

    async def send(self, message: Message, payload: memoryview | bytes = b"") -> None:
        """Send a message, and the bytes that follow it; return when their memory may be reused."""
        body = _encoder.encode(message)
        async with self._writing:  # the whole of it: another task may send meanwhile
            self._sent += 1
            mac = frame_mac(self._send_key, self._sent, body)
            await self._stream.write(len(body).to_bytes(4, "little") + mac + body, payload)

    async def receive(self) -> Any:
        """Return the next message. ConnectionError: the connection has ended, or what came is no message."""
        head = await self._stream.read(4 + MAC_SIZE)
        length = int.from_bytes(head[:4], "little")
        if length > self._limit:
            raise ConnectionError(f"the other end has announced a message of {length} bytes: too many")
        body = await self._stream.read(length)
        self._received += 1
        if frame_mac(self._receive_key, self._received, body) != head[4:]:
            raise ConnectionError("a message without the key of this connection")
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise ConnectionError(f"the other end has sent something unknown: {error}") from error

    async def read_into(self, memory: memoryview) -> None:
        """Read the bytes that follow a message."""
        await self._stream.read_into(memory)

    def close(self, cause: Exception) -> None:
        """End the connection; the first cause counts."""
        if self.cause is None:
            self.cause = cause
            self._stream.close()


def frame_mac(key: bytes, number: int, *parts: bytes | bytearray | memoryview) -> bytes:
    """Return the MAC of the frame with this number."""
    mac = hashlib.blake2b(number.to_bytes(8, "little"), key=key, digest_size=MAC_SIZE)
    for part in parts:
        mac.update(part)
    return mac.digest()


class SocketStream(asyncio.BufferedProtocol):
    """A connection's bytes: a payload is read from the kernel into its place, and written without a copy.

    What is pending raises ConnectionError when the connection ends. Used by the control thread alone.
    """

    def __init__(self) -> None:
        self.host = "127.0.0.1"  # this end's address, by which the other end reaches it
        self._head = bytearray(2 * _PAUSE)
        self._have = 0  # bytes in `_head` that were not read
        self._target: memoryview | None = None  # what `read_into` fills
        self._changes = Changes()
        self._error = ""  # why it has ended: text, as the traceback of an exception would keep objects alive
        self._paused = self._full = False

    # --- called by the loop ---

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport
        transport.set_write_buffer_limits(high=0)  # `write` returns when the kernel has the payload
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            self.host = socket.getnameinfo(sock.getsockname(), socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._error = self._error or str(exc or "closed by the other end")
        self._changes.tell()

    def eof_received(self) -> bool:
        return False  # the other end has closed: this end does, too

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._changes.tell()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._target is not None:
            return self._target
        if self._have == len(self._head):  # the loop reads on although it was told to pause
            self._head = self._head + bytearray(len(self._head))
        return memoryview(self._head)[self._have :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._target is not None:
            self._target = self._target[nbytes:] or None
            if self._target is not None:
                return
        else:
            self._have += nbytes
            if self._have >= _PAUSE and not self._paused:
                self._transport.pause_reading()
                self._paused = True
        self._changes.tell()

    # --- called by a ``Link`` ---

    async def read(self, size: int) -> bytes:
        """Return exactly ``size`` bytes."""
        if size > _PAUSE:
            data = bytearray(size)
            await self.read_into(memoryview(data))
            return bytes(data)
        await self._until(lambda: self._have >= size)
        data = bytes(self._head[:size])
        self._drop(size)
        return data

    async def read_into(self, memory: memoryview) -> None:
        ready = min(len(memory), self._have)
        memory[:ready] = self._head[:ready]
        self._drop(ready)
        if ready < len(memory):
            self._target = memory[ready:]
            try:
                await self._until(lambda: self._target is None)
            finally:
                self._target = None

    def _drop(self, size: int) -> None:
        self._head[: self._have - size] = self._head[size : self._have]
        self._have -= size
        if self._paused and self._have < _PAUSE:
            self._paused = False
            self._transport.resume_reading()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; ConnectionError: it does not, and the connection has ended."""
        await self._changes.until(lambda: condition() or self._error)
        if self._error and not condition():
            raise ConnectionError(self._error)

    async def write(self, head: bytes, payload: memoryview | bytes = b"") -> None:
        """Take both at once, in this order; then wait until the memory may be reused."""
        if self._error:
            raise ConnectionError(self._error)
        if payload:
            self._transport.writelines([head, payload])
        else:
            self._transport.write(head)
        await self._until(lambda: not self._full)

    def close(self) -> None:
        """End the connection, after what was written."""
        self._error = self._error or "the connection was closed at this end"
        with suppress(AttributeError):  # it was never connected
            self._transport.close()
        self._changes.tell()
