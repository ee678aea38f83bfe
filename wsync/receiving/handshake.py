"""A worker's side of the handshake. Called by the connecting thread, on a connection that the worker has made."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from wsync.control import Connection, Kind, Message
from wsync.control.settings import SenderSettings
from wsync.deadlines import wait_readable
from wsync.errors import NotConnected, SyncTimeout, WeightSyncError
from wsync.receiving.events import Event, Failed, Published
from wsync.types import Ack


def wait_accepted(connection: Connection, worker: int, deadline: float | None) -> Message:
    """Return the ``ACCEPTED`` message, which must arrive by ``deadline``.

    Raises:
        NotConnected: the sender refused this worker, or has gone.
        SyncTimeout: it did not answer in time.
    """
    message = _wait_message(connection, worker, deadline)
    if message.kind is not Kind.ACCEPTED:
        raise NotConnected(f"worker {worker} was refused: {message.payload.decode(errors='replace')}")
    return message


def settings_in(accepted: Message, worker: int) -> SenderSettings:
    """Return the settings in an ``ACCEPTED`` message; if they are invalid, close the descriptors that came along.

    Raises:
        ValueError: they are malformed, or not for this worker.
    """
    try:
        settings = SenderSettings.load(accepted.payload)
        if worker >= settings.workers:
            raise ValueError(f"there is no worker {worker} of {settings.workers}")
    except ValueError:
        for descriptor in accepted.fds:
            os.close(descriptor)
        raise
    return settings


def wait_first_update(
    connection: Connection,
    worker: int,
    deadline: float | None,
    arrived: Sequence[Message],
    event_of: Callable[[Message], Event | None],
) -> None:
    """Receive the version that the sender sends at once; the first ``poll_update`` returns it.

    Args:
        connection: to the sender.
        worker: the worker's index.
        deadline: by when each message must have arrived; None for no limit.
        arrived: messages that were read while the transport was set up.
        event_of: processes a message.

    Raises:
        WeightSyncError: the version did not arrive.
        ValueError: a message is malformed, or unexpected.
        NotConnected: the sender has gone.
        SyncTimeout: it did not send in time.
    """
    waiting = list(arrived)
    while True:
        message = waiting.pop(0) if waiting else _wait_message(connection, worker, deadline)
        event = event_of(message)
        if isinstance(event, Published):
            return
        if isinstance(event, Failed):
            connection.send(Message.answer(Ack(worker, event.version, event.error)))
            raise WeightSyncError(f"worker {worker} did not get its first weights:\n{event.error}")
        if event is not None:
            raise ValueError(f"an unexpected message {message.kind.name}")


def _wait_message(connection: Connection, worker: int, deadline: float | None) -> Message:
    ready = wait_readable(connection.descriptors, deadline)
    if not ready:
        raise SyncTimeout(f"worker {worker}: the sender did not answer: does it call connect() too?")
    # A forked child of a dead sender may keep the socket open: then only the pidfd is readable.
    message = connection.receive() if connection.fileno() in ready else None
    if message is None or message.kind is Kind.LEAVE:
        raise NotConnected(f"worker {worker} was not accepted: the sender went away")
    return message
