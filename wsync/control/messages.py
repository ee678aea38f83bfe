"""The messages between a sender and a worker: a header of fixed size, and a payload."""

from __future__ import annotations

import struct
from collections.abc import Collection
from enum import IntEnum
from typing import NamedTuple

from wsync.errors import join_indices
from wsync.types import Ack

PROTOCOL = 14  # version of the messages; both sides must have the same
HEADER = struct.Struct("<BxxxiQQdd")  # kind, worker, version, length of the payload, wait, apply (in C: csrc/words.h)
HEADER_SIZE = HEADER.size
MAX_HELLO = 1024  # bytes; the largest payload of a HELLO
TRANSACTION = struct.Struct("<Q")  # number of a transaction, at the beginning of a payload
REQUEST_NUMBER = struct.Struct("<Q")  # in the payload of the answer to a REQUEST


class Kind(IntEnum):
    """The kinds of messages. The comments name the payload, and ``version`` where it is not that of the weights.

    The arena is the sender's shared memory. A worker that does not use it receives weights by a transport, or in a
    message.
    """

    # from the sender to a worker
    ACCEPTED = 1  # the worker is registered; version: of its first weights, 0 for none; payload: SenderSettings
    REJECTED = 2  # the worker is not registered; payload: the reason
    LAYOUT = 3  # the layout of the weights; payload: SenderSettings
    # Install a version; payload: checksum and extra state. The payload is empty if a BEGIN_RECEIVE had them, and with
    # the arena, where both are stored beside the weights.
    UPDATE = 4
    PREPARE = 5  # check and keep a version; payload: the transaction, then the arena's slot, or UPDATE's payload
    # Drop what was prepared (version: the transaction's number), or stop receiving (version: that of BEGIN_RECEIVE).
    # To tell them apart: versions are below LAST_VERSION, numbers of transactions are not.
    ABORT = 6
    # Install what was prepared; version: the number of the transaction. It is not sent to workers that read the arena:
    # for them the sender publishes the prepared slot.
    COMMIT = 7
    RESEND = 8  # repeat the last answer: it did not arrive in time, or an exception interrupted the sender's reading
    CHECK_LAYOUT = 9  # answer whether weights of a layout would fit; payload: SenderSettings
    BEGIN_RECEIVE = 10  # begin to receive a version, before its UPDATE or PREPARE; payload: checksum and extra state
    # The weights as a difference to the worker's, in this message instead of by the transport; see transforms/delta.py.
    DELTA = 11  # before the UPDATE or PREPARE of the version; payload: the difference
    NEWEST = 12  # with initiator="receiver": names the newest version; payload: the number of the REQUEST, 0 if unasked
    UPDATE_WITH_WEIGHTS = 13  # like UPDATE; payload: as of UPDATE, then the packed weights
    # from a worker to the sender
    HELLO = 16  # the first message; version: PROTOCOL; payload: credentials, own_identity(), what connect() was given
    ACK = 17  # a version is installed
    PREPARED = 18  # after PREPARE: the version was checked and kept; after CHECK_LAYOUT: the layout fits
    FAILED = 19  # a version was not installed, or not kept; payload: the traceback
    SLOT_FREED = 20  # a slot of the arena that the sender waits for is free
    # The answer to an ACCEPTED with an arena_handle in its SenderSettings; version: 1 if the arena's files could be
    # opened, 0 if the worker needs a transport
    ROUTE = 21
    REQUEST = 22  # with initiator="receiver": send the newest version; version: the number of this request
    # both ways
    # this side closes the connection on purpose; version: 1 if it is a sender that shuts down, else 0; payload: why
    LEAVE = 32
    # A key and its value that one end of a transport sets for the other end, while a process group is being formed;
    # payload: see transport_setup.py.
    SETUP_KEY = 33
    DATA = 34  # for other users of a connection, such as collectors


_KINDS = {int(kind): kind for kind in Kind}  # a lookup here is five times as fast as Kind(number)


class Message(NamedTuple):
    """One message.

    Attributes:
        version: the version of the weights, or 0; some kinds use it otherwise, see ``Kind``.
        wait: in ``ACK``, seconds from the arrival of the update's message until installing began.
        apply: in ``ACK``, seconds that installing took.
        fds: up to four open descriptors (Unix sockets only); the process that receives the message owns its copies.
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
        return cls(kind, ack.worker, ack.version, ack.error.encode(errors="backslashreplace"), ack.wait, ack.apply)

    def parts(self) -> list[bytes]:
        """Return header and payload as separate objects, so that the payload is not copied."""
        header = HEADER.pack(self.kind, self.worker, self.version, len(self.payload), self.wait, self.apply)
        return [header, self.payload] if self.payload else [header]

    def pack(self) -> bytes:
        """Return header and payload."""
        return b"".join(self.parts())


def why_not_connected(workers: Collection[int], running: Collection[int]) -> str:
    """Return the text of a timeout: ``workers`` did not connect, and the processes of ``running`` have not ended."""
    hint = f" (the process of worker(s) {join_indices(running)} is still running)" if running else ""
    return (
        f"worker(s) {join_indices(workers)} did not connect in time{hint}: each worker must call init_on_receiver(…, "
        "worker_idx=…) and connect() while the sender waits; see the workers' output, or raise the timeout"
    )


def why_rejected(hello: Message, num_workers: int, taken_by: str) -> str:
    """Return why a sender rejects the worker that has sent ``hello``; empty if it does not.

    Args:
        hello: the first message of a worker.
        num_workers: the number of workers.
        taken_by: the process that is connected under the worker's index; empty if there is none.
    """
    if hello.version != PROTOCOL:
        return f"it has protocol {hello.version}, the sender {PROTOCOL}: two versions of wsync"
    if not 0 <= hello.worker < num_workers:
        return f"worker_idx {hello.worker} is out of range: there are {num_workers} workers"
    return f"worker_idx {hello.worker} is taken by {taken_by}" if taken_by else ""


def why_ended(peer: str, message: Message | None) -> str:
    """Return why a connection has ended: ``message`` was received last, None if it just ended."""
    if message is None:
        return f"{peer} died, or its connection broke"
    if message.kind is not Kind.LEAVE:
        return f"{peer} sent an unexpected message {message.kind.name}"
    reason = f": {message.payload.decode(errors='replace')}" if message.payload else ""
    return f"{peer} has shut down its side{reason}"


def payload_length(header: bytes | bytearray) -> int:
    """Return the length of the payload that a header of ``HEADER_SIZE`` bytes announces."""
    return HEADER.unpack_from(header)[3]


def unpack(header: bytes | bytearray, payload: bytes, fds: tuple[int, ...] = ()) -> Message:
    """Return the message of a header and its payload.

    Raises:
        ValueError: the header is too short, or of an unknown kind.
    """
    try:
        kind, worker, version, _, wait, apply = HEADER.unpack_from(header)
        return Message(_KINDS[kind], worker, version, payload, wait, apply, fds)
    except struct.error as error:
        raise ValueError(f"the header must have {HEADER_SIZE} bytes, not {len(header)}") from error
    except KeyError as error:
        raise ValueError(f"unknown message kind: {error}") from error


def unpack_exactly(form: struct.Struct, payload: bytes) -> tuple[int, ...]:
    """Return the numbers in a payload that has the size of ``form``.

    Raises:
        ValueError: the payload has another size.
    """
    if len(payload) != form.size:
        raise ValueError(f"the payload must have {form.size} bytes, not {len(payload)}")
    return form.unpack(payload)
