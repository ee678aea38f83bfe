"""A worker's channel to its sender: the connection, and the reader of the weights (from the arena or a transport)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from wsync.control import Connection, Kind, Message
from wsync.control.handshake import SenderSettings, layout_in
from wsync.control.messages import REQUEST, unpack_exactly
from wsync.control.receiver_thread import MessageHandler
from wsync.deadlines import wait_readable
from wsync.errors import NotConnected, SyncTimeout, WeightSyncError
from wsync.receiving.arena_reader import ArenaReader
from wsync.receiving.events import CheckLayout, Closed, Decision, Event, Failed, Newest
from wsync.receiving.protocols import Poller, UpdateReader, UpdateReceiver
from wsync.receiving.readers import ReaderFactory
from wsync.receiving.transport_reader import TransportReader
from wsync.shm.registered import RegisteredView
from wsync.types import ANY_VERSION, Ack, Update
from wsync.weights.binding import Binding
from wsync.weights.layout import Layout

_log = logging.getLogger(__name__)


class SenderChannel:
    """A worker's channel to its sender. Implements ``wsync.receiving.protocols.ReceiveChannel``; see there for threads.

    Args:
        dial: ``(worker, deadline) -> connection``.
        readers: makes the reader of an accepted connection.
        on_connected: called with the worker's index when the sender has accepted it.
    """

    def __init__(
        self,
        dial: Callable[[int, float | None], Connection],
        readers: ReaderFactory,
        *,
        on_connected: Callable[[int], None],
    ) -> None:
        self._dial = dial
        self._readers = readers
        self._on_connected = on_connected
        self._pending: Connection | None = None  # the sender has not accepted it yet
        self._connection: Connection | None = None
        self._reader: UpdateReader | None = None
        self._worker = -1
        self._layout: Layout | None = None
        self.first_version = 0
        self._wakeups = True
        self._last_answer: Message | None = None
        self._newest = 0  # the newest version that the sender has named, where workers fetch
        self._requests = 0

    @property
    def layout(self) -> Layout | None:
        """See ``ReceiveChannel``."""
        return self._layout

    @property
    def binds(self) -> bool:
        """See ``ReceiveChannel``."""
        return self._reader is not None and self._reader.binds

    # --- connecting ---

    def begin_connect(self, worker_idx: int, deadline: float | None) -> Sequence[int]:
        """See ``ReceiveChannel``."""
        self._pending = self._dial(worker_idx, deadline)
        return self._pending.descriptors

    def connect(self, worker_idx: int, deadline: float | None) -> None:
        """See ``ReceiveChannel``."""
        connection, self._pending = self._pending or self._dial(worker_idx, deadline), None
        self._worker, self._connection = worker_idx, connection
        try:
            self._join(connection, deadline)
        except ConnectionError as error:
            self.close()
            raise _went_away(worker_idx) from error
        except BaseException:
            self.close()
            raise
        self._on_connected(worker_idx)
        _log.debug("worker %d is connected to %s", worker_idx, connection.peer)

    def _join(self, connection: Connection, deadline: float | None) -> None:
        accepted = self._wait_message(connection, deadline)
        if accepted.kind is not Kind.ACCEPTED:
            raise NotConnected(f"worker {self._worker} was refused: {accepted.payload.decode(errors='replace')}")
        self.first_version = accepted.version
        try:
            settings = self._settings_in(accepted)
            self._reader, early = self._readers.open(connection, self._worker, settings, accepted.fds, deadline)
            self._reader.set_wakeups(self._wakeups)
            if settings.layout is not None:
                self._set_layout(settings)
            if accepted.version and isinstance(self._reader, TransportReader):  # the first weights follow at once
                self._first_update(connection, early, deadline)
        except WeightSyncError:  # also a LayoutMismatch, which is a ValueError
            raise
        except ValueError as error:
            reason = f"got an invalid message of the sender: {error}"
            self._send(Message.answer(Ack(self._worker, ANY_VERSION, f"it {reason}")))
            raise NotConnected(f"worker {self._worker} {reason}") from error

    def _settings_in(self, accepted: Message) -> SenderSettings:
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

    def _set_layout(self, settings: SenderSettings) -> None:
        if self._reader is None or settings.layout is None:
            raise ValueError("the settings have no layout")
        self._reader.set_layout(settings.layout, settings.checksum, delta=settings.delta)
        self._layout = settings.layout

    def _first_update(self, connection: Connection, early: Sequence[Message], deadline: float | None) -> None:
        """Receive the version that the sender sends at once; the first ``poll_update`` returns it."""
        waiting = list(early)
        while True:
            message = waiting.pop(0) if waiting else self._wait_message(connection, deadline)
            for event in self._events_of(message):
                if isinstance(event, Failed):
                    connection.send(Message.answer(Ack(self._worker, event.version, event.error)))
                    raise WeightSyncError(f"worker {self._worker} did not get its first weights:\n{event.error}")
                if message.kind is not Kind.UPDATE:
                    raise ValueError(f"an unexpected message {message.kind.name}")
                return

    def _wait_message(self, connection: Connection, deadline: float | None) -> Message:
        """Return the next message of the sender.

        Raises:
            NotConnected: it has gone.
            SyncTimeout: none came before ``deadline``.
        """
        ready = wait_readable(connection.descriptors, deadline)
        if not ready:
            raise SyncTimeout(f"worker {self._worker}: the sender did not answer: does it call connect() too?")
        # A forked child of a dead sender may keep the socket open: then only the pidfd is readable.
        message = connection.receive() if connection.fileno() in ready else None
        if message is None or message.kind is Kind.LEAVE:
            raise NotConnected(f"worker {self._worker} was not accepted: the sender went away")
        return message

    def _open(self) -> Connection:
        if self._connection is None:
            raise NotConnected("this worker is not connected: call connect(worker_idx=…) first")
        return self._connection

    # --- messages ---

    def attach(self, handler: MessageHandler) -> None:
        """See ``ReceiveChannel``."""
        try:
            self._open().attach(handler)
        except ConnectionError as error:
            raise _went_away(self._worker) from error

    def detach(self, handler: MessageHandler) -> None:
        """See ``ReceiveChannel``."""
        if self._connection is not None:
            self._connection.detach(handler)

    def fetch_newest(self) -> Sequence[Event]:
        """See ``ReceiveChannel``: the sender announces its updates."""
        return ()

    def newest_version(self) -> int:
        """See ``ReceiveChannel``."""
        reader = self._reader
        return reader.newest_version if isinstance(reader, ArenaReader) else self._newest

    def request_newest(self) -> int:
        """See ``ReceiveChannel``."""
        if self._connection is None or isinstance(self._reader, ArenaReader):
            return 0
        self._requests += 1
        self._send(Message(Kind.REQUEST, self._worker, self._requests))
        return self._requests

    def sender_is_alive(self) -> bool:
        """See ``ReceiveChannel``."""
        return self._connection is None or self._connection.peer_is_alive()

    def receive_events(self) -> Sequence[Event]:
        """See ``ReceiveChannel``."""
        return self._events(self._open().receive())

    def _events(self, message: Message | None) -> Sequence[Event]:
        if message is None or message.kind is Kind.LEAVE:
            _log.debug("worker %d: the sender %s", self._worker, "has shut down" if message else "is gone")
            return [Closed(finished=message is not None and message.version == 1)]
        try:
            return self._events_of(message)
        except ConnectionError as error:
            _log.debug("worker %d: %s", self._worker, error)
        except ValueError as error:
            self.answer(Ack(self._worker, ANY_VERSION, f"it got an invalid message of the sender: {error}"))
        if self._connection is not None:
            _leave(self._connection)
        return [Closed()]

    def _events_of(self, message: Message) -> Sequence[Event]:
        """Return the events of a message.

        Raises:
            ValueError: it is malformed, or unexpected.
            ConnectionError: the transport has broken.
        """
        reader, kind = self._reader, message.kind
        if reader is None:
            raise ValueError(f"a message {kind.name} before the handshake")
        if kind is Kind.UPDATE:
            return reader.published(message.version, message.payload)
        if kind is Kind.FETCH:
            return reader.fetch(message.version, message.payload)
        if kind is Kind.DELTA:
            return reader.take_difference(message.version, message.payload)
        if kind is Kind.PREPARE:
            return reader.prepare(message.version, message.payload)
        if kind in (Kind.COMMIT, Kind.ABORT):
            commit = kind is Kind.COMMIT
            reader.decide(message.version, commit)
            return [Decision(message.version, commit)]
        if kind is Kind.CHECK_LAYOUT:
            return [CheckLayout(message.version, layout_in(message.payload))]
        if kind is Kind.LAYOUT:
            self._set_layout(SenderSettings.load(message.payload))
            return []
        if kind is Kind.NEWEST:
            (request,) = unpack_exactly(REQUEST, message.payload)
            self._newest = max(self._newest, message.version)
            return [Newest(message.version, request)]
        if kind is Kind.RESEND:
            if self._last_answer is not None:
                self._open().send(self._last_answer)
            return []
        raise ValueError(f"an unexpected message {kind.name}")

    # --- updates: see ``ReceiveChannel`` for the threads ---

    def poller(self, receiver: UpdateReceiver) -> Poller:
        """See ``ReceiveChannel``."""
        return receiver if self._reader is None else self._reader.poller(receiver)

    def enable_fast_path(self, binding: Binding) -> None:
        """See ``ReceiveChannel``."""
        if self._reader is not None and self._connection is not None and not self._connection.busy:
            self._reader.enable_fast_path(binding, self._connection.socket_fd)

    def set_wakeups(self, wanted: bool) -> None:
        """See ``ReceiveChannel``."""
        self._wakeups = wanted
        if self._reader is not None:
            self._reader.set_wakeups(wanted)

    def registered(self) -> RegisteredView | None:
        """See ``ReceiveChannel``."""
        return self._reader.registered() if isinstance(self._reader, ArenaReader) else None

    def hold_previous(self) -> None:
        """See ``ReceiveChannel``."""
        if self._reader is not None:
            self._reader.hold_previous()

    def poll_update(self) -> Update | None:
        """See ``ReceiveChannel``."""
        return None if self._reader is None else self._reader.poll_update()

    def on_installed(self, update: Update, error: str) -> None:
        """See ``ReceiveChannel``."""
        # Also of an update that is not acknowledged: RESEND may ask for its answer.
        self._last_answer = Message.answer(Ack(self._worker, update.version, error))
        if self._reader is None:
            return
        self._reader.on_installed(update, error)
        if isinstance(self._reader, ArenaReader) and not self._reader.binds:  # copied: the slot is free
            self.forward_ended()

    def forward_ended(self) -> None:
        """See ``ReceiveChannel``."""
        if self._reader is not None and self._reader.forward_ended():
            self._send(Message(Kind.SLOT_FREED, self._worker))

    def answer(self, ack: Ack, *, prepared: bool = False) -> None:
        """See ``ReceiveChannel``."""
        self._last_answer = Message.answer(ack, prepared=prepared)
        self._send(self._last_answer)
        if self._reader is not None:
            self._reader.answered()

    def _send(self, message: Message) -> None:
        """Send; if the sender is gone, the receiver thread will notice."""
        try:
            connection = self._open()
            connection.send(message)
        except ConnectionError:
            return
        if connection.busy and self._reader is not None:  # the fast path would write to the socket directly
            self._reader.disable_fast_path()

    def close(self) -> None:
        """See ``ReceiveChannel``."""
        if self._pending is not None:
            _leave(self._pending)  # over RPC the sender has no other way to notice
            self._pending = None
        if self._connection is not None:
            _leave(self._connection)
            self._connection = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._layout = self._last_answer = None


def _went_away(worker: int) -> NotConnected:
    return NotConnected(f"worker {worker}: the sender went away while this worker connected")


def _leave(connection: Connection) -> None:
    """Close a connection, after a message that this is on purpose."""
    try:
        connection.send(Message(Kind.LEAVE))
    except ConnectionError:
        pass
    finally:
        connection.close()
