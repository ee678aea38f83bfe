"""How a worker is let in: it has knocked, and hears what the sender says to that."""

from __future__ import annotations

from wsync.deadlines import wait_readable
from wsync.errors import NotConnected, SyncTimeout
from wsync.wire.words import Kind, Line, Message


def let_in(line: Line, worker_idx: int, deadline: float | None) -> Message:
    """The sender's welcome.

    Raises:
        NotConnected: it went away, or does not let this worker in; says why.
        SyncTimeout: it did not answer before ``deadline``.
    """
    message = await_word(line, worker_idx, deadline)
    if message.kind is not Kind.WELCOME:
        raise NotConnected(f"worker {worker_idx} was not let in: {message.payload.decode(errors='replace')}")
    return message


def await_word(line: Line, worker_idx: int, deadline: float | None) -> Message:
    """The next thing that the sender says.

    Raises:
        NotConnected, SyncTimeout: as ``let_in``.
    """
    ready = wait_readable(line.signs, deadline)
    if not ready:
        raise SyncTimeout(f"worker {worker_idx}: the sender did not answer: does it call connect() too?")
    # A forked child may hold the dead sender's end open: then only the process says that it is gone.
    message = line.receive() if line.fileno() in ready else None
    if message is None or message.kind is Kind.BYE:
        raise NotConnected(f"worker {worker_idx} was not let in: the sender went away")
    return message
