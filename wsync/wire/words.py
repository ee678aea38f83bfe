"""What the two ends of a line say to each other, whatever the line is made of."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from wsync.types import Ack

PROTOCOL = 9
_HEADER = struct.Struct("<BxxxiQQdd")  # kind, worker, version, length, wait, apply
HEADER_SIZE = _HEADER.size
TRANSACTION = struct.Struct("<Q")  # what the payloads of STAGE, DROP and DECIDE begin with, where they have one


class Kind(IntEnum):
    """What a message says. The first nine go to a worker, the others come from one; BYE goes either way."""

    WELCOME = 1  # payload: the layout, or nothing yet
    REFUSED = 2  # payload: why
    LAYOUT = 3  # the layout, after a lazy start
    NEWS = 4  # a version is published: pass through the gate
    STAGE = 5  # check a version and keep it ready; payload: transaction, and where the version is
    DROP = 6  # the transaction is off; payload: transaction, or on one machine ``version`` is
    DECIDE = 7  # install what is staged in the transaction; payload: transaction
    ASK = 8  # say once more what you said last: it has not come
    PROPOSE = 9  # look whether weights like these would fit; payload: the layout, of which nothing is made yet
    HELLO = 16  # payload: what shows that the token is known, and over a network who this is
    ACK = 17  # a version is installed
    STAGED = 18  # a version is checked and ready
    FAILED = 19  # it is not; payload: the traceback
    FREED = 20  # a slot that the sender waits for is free
    BYE = 21  # this end leaves of its own will


_KINDS = {int(kind): kind for kind in Kind}  # a fifth of the time of Kind(number)


class Message(NamedTuple):
    """One message between the two ends.

    Attributes:
        version: of the weights that it is about, 0 if there are none; of the protocol, in ``HELLO``; the transaction
            itself, in a ``DROP`` on one machine.
        wait: seconds from the moment a worker was told of the version until it could begin to install it, in ``ACK``.
        apply: seconds that it took to install it, in ``ACK``.
        fds: owned by whoever received it.
    """

    kind: Kind
    worker: int = -1
    version: int = 0
    payload: bytes = b""
    wait: float = 0.0
    apply: float = 0.0
    fds: tuple[int, ...] = ()

    @classmethod
    def answer(cls, ack: Ack, staged: bool = False) -> Message:
        """An acknowledgement as a worker sends it."""
        kind = Kind.FAILED if ack.error else Kind.STAGED if staged else Kind.ACK
        return cls(kind, ack.worker, ack.version, ack.error.encode(), ack.wait, ack.apply)

    def header(self, length: int) -> bytes:
        """The fixed part, ``HEADER_SIZE`` bytes, for a payload of ``length`` bytes."""
        return _HEADER.pack(self.kind, self.worker, self.version, length, self.wait, self.apply)

    def pack(self) -> bytes:
        """Header and payload."""
        return self.header(len(self.payload)) + self.payload


def length_in(header: bytes | bytearray) -> int:
    """The length of the payload, as ``header`` (of ``HEADER_SIZE`` bytes at least) says."""
    return _HEADER.unpack_from(header)[3]


def unpack(data: bytes | bytearray, payload: bytes | None = None, fds: tuple[int, ...] = ()) -> Message:
    """The message whose header ``data`` begins with; its payload follows there, unless it came apart.

    Raises:
        ValueError: this is no message.
    """
    try:
        kind, worker, version, _, wait, apply = _HEADER.unpack_from(data)
        return Message(
            _KINDS[kind], worker, version, bytes(data[HEADER_SIZE:]) if payload is None else payload, wait, apply, fds
        )
    except struct.error as error:
        raise ValueError(f"a message is at least {HEADER_SIZE} bytes, not {len(data)}") from error
    except KeyError as error:
        raise ValueError(f"there is no message of kind {error}") from error


def unpacked(form: struct.Struct, payload: bytes) -> tuple[int, ...]:
    """What a payload of just this ``form`` says.

    Raises:
        ValueError: it has another size.
    """
    if len(payload) != form.size:
        raise ValueError(f"{len(payload)} bytes where {form.size} were expected")
    return form.unpack(payload)


class Line(Protocol):
    """One end of the conversation between a sender and one worker."""

    @property
    def peer(self) -> str:
        """Who is at the other end, for people."""
        ...

    @property
    def signs(self) -> Sequence[int]:
        """Descriptors that become readable when the other end has said something, or has died; ``fileno`` first."""
        ...

    def fileno(self) -> int:
        """Readable when there is something to ``receive``."""
        ...

    def send(self, message: Message) -> None:
        """Send one message, whole.

        Raises:
            ConnectionError: the other end is gone.
        """
        ...

    def call(self, message: Message) -> None:
        """Send a message without payload that may be left out where many like it wait to be read."""
        ...

    def receive(self) -> Message | None:
        """The next message, once the descriptor is readable; None if the other end is gone."""
        ...

    def close(self) -> None:
        """Hang up; harmless when repeated."""
        ...


class Door(Protocol):
    """Where a sender lets workers in."""

    def fileno(self) -> int:
        """Readable when somebody is at the door."""
        ...

    def accept(self) -> tuple[Line, Message] | None:
        """Who is at the door, and its hello; None if it was a stranger, or gone again."""
        ...

    def close(self) -> None:
        """Shut it; harmless when repeated."""
        ...
