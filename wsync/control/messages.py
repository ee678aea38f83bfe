"""The messages between a sender and a worker: a header of fixed size, and a payload."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from wsync.types import Ack

PROTOCOL = 10  # version of everything in this package; both sides must have the same
_HEADER = struct.Struct("<BxxxiQQdd")  # kind, worker, version, length of the payload, wait, apply
HEADER_SIZE = _HEADER.size
TRANSACTION = struct.Struct("<Q")  # number of a transaction, at the beginning of a payload


class Kind(IntEnum):
    """The kinds of messages: below 16 to a worker, below 32 from a worker, others both; ``version`` is overloaded."""

    ACCEPTED = 1  # the worker is registered; version: sent as it joins, or 0; payload: SenderSettings
    REFUSED = 2  # it is not; payload: the reason
    LAYOUT = 3  # the layout is known now; payload: SenderSettings
    UPDATE = 4  # a version is published; payload, from a transport: checksum and extra state
    PREPARE = 5  # before COMMIT, so all switch or none: check, keep; payload: transaction, then UPDATE's or arena slot
    ABORT = 6  # undo PREPARE (a worker failed; version: transaction) or FETCH (sending failed; version: FETCH's)
    COMMIT = 7  # all have PREPARED: install; version: the transaction (in the arena, the published word commits)
    RESEND = 8  # repeat the last answer: the sender has none in time (a signal handler may have raised while reading)
    CHECK_LAYOUT = 9  # answer whether weights of a layout would fit; payload: SenderSettings
    FETCH = 10  # before UPDATE: receive now, as send_weights may wait for that; payload: checksum and extra state
    HELLO = 16  # first message of a connection; version: PROTOCOL; payload: credentials, then the sending process
    ACK = 17  # a version is installed
    PREPARED = 18  # a version is checked and kept
    FAILED = 19  # a version was not installed, or not kept; payload: the traceback
    SLOT_FREED = 20  # a slot of the arena that the sender waits for is free
    JOINED = 21  # how the worker receives weights; version: 1 for the arena, 0 for the transport
    LEAVE = 32  # this side closes the connection on purpose
    STORE = 33  # a key and its value, for the two sides of a process group that is being formed
    DATA = 34  # payload of the connection's user


_KINDS = {int(kind): kind for kind in Kind}  # a lookup here is five times as fast as Kind(number)


class Message(NamedTuple):
    """One message.

    Attributes:
        version: of the weights that it is about, or 0; some kinds use it otherwise, see ``Kind``.
        wait: in ``ACK``, seconds from the arrival of the update's message until installing began.
        apply: in ``ACK``, seconds that installing took.
        fds: open descriptors that travel with it (Unix sockets only); the receiver of the message owns them.
    """

    kind: Kind
    worker: int = -1
    version: int = 0
    payload: bytes = b""
    wait: float = 0.0
    apply: float = 0.0
    fds: tuple[int, ...] = ()

    @classmethod
    def answer(cls, ack: Ack, *, prepared: bool = False) -> Message:
        """Return the message that carries a worker's acknowledgement."""
        kind = Kind.FAILED if ack.error else Kind.PREPARED if prepared else Kind.ACK
        return cls(kind, ack.worker, ack.version, ack.error.encode(), ack.wait, ack.apply)

    def pack(self) -> bytes:
        """Return header and payload."""
        header = _HEADER.pack(self.kind, self.worker, self.version, len(self.payload), self.wait, self.apply)
        return header + self.payload if self.payload else header


def payload_length(header: bytes | bytearray) -> int:
    """Return the length of the payload that a header of ``HEADER_SIZE`` bytes announces."""
    return _HEADER.unpack_from(header)[3]


def unpack(header: bytes | bytearray, payload: bytes, fds: tuple[int, ...] = ()) -> Message:
    """Return the message of a header and its payload.

    Raises:
        ValueError: the header is too short, or of an unknown kind.
    """
    try:
        kind, worker, version, _, wait, apply = _HEADER.unpack_from(header)
        return Message(_KINDS[kind], worker, version, payload, wait, apply, fds)
    except struct.error as error:
        raise ValueError(f"the header must have {HEADER_SIZE} bytes, not {len(header)}") from error
    except KeyError as error:
        raise ValueError(f"unknown message kind: {error}") from error


def unpack_exactly(form: struct.Struct, payload: bytes) -> tuple[int, ...]:
    """Return the numbers in a payload that is exactly one ``form``.

    Raises:
        ValueError: the payload has another size.
    """
    if len(payload) != form.size:
        raise ValueError(f"the payload must have {form.size} bytes, not {len(payload)}")
    return form.unpack(payload)
