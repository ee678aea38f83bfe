"""A worker's side of the handshake: the messages that it waits for while it connects."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from wsync.control import Connection, Kind, Message
from wsync.control.settings import SenderSettings
from wsync.deadlines import wait_readable
from wsync.errors import NotConnected, SyncTimeout, WeightSyncError
from wsync.receiving.events import Event, Failed
from wsync.types import Ack


class Handshake:
    """The handshake on a connection that the worker has made. Used by the connecting thread.

    Args:
        connection: to the sender.
        worker: the worker's index.
        deadline: until when each message has to have come; None for no limit.
    """

    def __init__(self, connection: Connection, worker: int, deadline: float | None) -> None:
        self._connection = connection
        self._worker = worker
        self._deadline = deadline

    def wait_accepted(self) -> Message:
        """Return the ``ACCEPTED`` message.

        Raises:
            NotConnected: the sender refused this worker, or has gone.
            SyncTimeout: it did not answer in time.
        """
        message = self._wait_message()
        if message.kind is not Kind.ACCEPTED:
            raise NotConnected(f"worker {self._worker} was refused: {message.payload.decode(errors='replace')}")
        return message

    def settings_in(self, accepted: Message) -> SenderSettings:
        """Return the settings in an ``ACCEPTED`` message; if they are invalid, close the descriptors that came along.

        Raises:
            ValueError: they are malformed, or not for this worker.
        """
        try:
            settings = SenderSettings.load(accepted.payload)
            if self._worker >= settings.workers:
                raise ValueError(f"there is no worker {self._worker} of {settings.workers}")
        except ValueError:
            for descriptor in accepted.fds:
                os.close(descriptor)
            raise
        return settings

    def wait_first_update(self, arrived: Sequence[Message], events_of: Callable[[Message], Sequence[Event]]) -> None:
        """Receive the version that the sender sends at once; the first ``poll_update`` returns it.

        Args:
            arrived: messages that were read while the transport was set up.
            events_of: processes a message.

        Raises:
            WeightSyncError: the version did not arrive.
            ValueError: a message is malformed, or unexpected.
            NotConnected: the sender has gone.
            SyncTimeout: it did not send in time.
        """
        waiting = list(arrived)
        while True:
            message = waiting.pop(0) if waiting else self._wait_message()
            for event in events_of(message):
                if isinstance(event, Failed):
                    self._connection.send(Message.answer(Ack(self._worker, event.version, event.error)))
                    raise WeightSyncError(f"worker {self._worker} did not get its first weights:\n{event.error}")
                if message.kind is not Kind.UPDATE:
                    raise ValueError(f"an unexpected message {message.kind.name}")
                return

    def _wait_message(self) -> Message:
        ready = wait_readable(self._connection.descriptors, self._deadline)
        if not ready:
            raise SyncTimeout(f"worker {self._worker}: the sender did not answer: does it call connect() too?")
        # A forked child of a dead sender may keep the socket open: then only the pidfd is readable.
        message = self._connection.receive() if self._connection.fileno() in ready else None
        if message is None or message.kind is Kind.LEAVE:
            raise NotConnected(f"worker {self._worker} was not accepted: the sender went away")
        return message
