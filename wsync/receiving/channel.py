"""The worker's side of a channel: the connection, and the reader of the weights (from the arena or a transport)."""

from __future__ import annotations

import logging
import os
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from wsync.control import Connection, Kind, Message
from wsync.control.messages import REQUEST_NUMBER, unpack_exactly
from wsync.control.receiver_thread import MessageHandler
from wsync.control.settings import SenderSettings, layout_in
from wsync.errors import NotConnected, WeightSyncError
from wsync.receiving.arena_reader import ArenaReader
from wsync.receiving.blocking_reader import BlockingReader
from wsync.receiving.events import CheckLayout, Closed, Decision, Event, Failed, Newest, Published
from wsync.receiving.flat_reader import FlatReader
from wsync.receiving.handshake import ReaderFactory, settings_in, wait_accepted, wait_first_update
from wsync.receiving.transport_reader import TransportReader
from wsync.types import ANY_VERSION, Ack, Update
from wsync.weights.layout import Layout

_log = logging.getLogger(__name__)


class WorkerSideChannel:
    """A worker's connection to the sender. A ``RequestChannel``: see there, and in ``ReceiveChannel``, for the threads.

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
        self._reader: ArenaReader | TransportReader | None = None
        self._unread: deque[Message] = deque()  # arrived while the transport was set up, not processed yet
        self._worker = -1
        self._layout: Layout | None = None
        self.first_version = 0
        self._newest = 0  # the newest version that the sender has named (with initiator="receiver")
        self._requests = 0
        self._creator = os.getpid()

    @property
    def layout(self) -> Layout | None:
        """See ``ReceiveChannel``."""
        return self._layout

    @property
    def binds(self) -> bool:
        """See ``ReceiveChannel``."""
        return self._reader is not None and self._reader.binds

    @property
    def arena(self) -> ArenaReader | None:
        """See ``ReceiveChannel``."""
        return self._reader if isinstance(self._reader, ArenaReader) else None

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
            raise _went_away(worker_idx, error) from error
        except BaseException as error:
            _leave(connection, f"{type(error).__name__}: {error}")
            self._connection = None
            self.close()
            raise
        self._on_connected(worker_idx)
        route = "a transport" if self.arena is None else "the sender's memory"
        _log.debug("worker %d is connected to %s, and takes weights from %s", worker_idx, connection.peer_name, route)

    def _join(self, connection: Connection, deadline: float | None) -> None:
        worker, self._newest = self._worker, 0
        accepted = wait_accepted(connection, worker, deadline)
        self.first_version = accepted.version
        try:
            settings = settings_in(accepted, worker)
            self._reader, unread = self._readers.open(connection, worker, settings, accepted.fds, deadline)
            self._set_layout(self._reader, settings)
            self._unread = deque(unread)
            if accepted.version and self.arena is None:  # the first weights follow at once
                arrived = wait_first_update(connection, worker, deadline, self._unread, self._event_of)
                self.first_version = accepted.version if arrived else 0
        except WeightSyncError:  # also a LayoutMismatch, which is a ValueError
            raise
        except ValueError as error:
            reason = f"got an invalid message from the sender: {error}"
            self._send(Message.answer(Ack(worker, ANY_VERSION, f"it {reason}")))
            raise NotConnected(f"worker {worker} {reason}") from error

    def _set_layout(self, reader: ArenaReader | TransportReader, settings: SenderSettings) -> None:
        """Use the layout in ``settings`` from now on, if they have one."""
        if settings.layout is not None:
            reader.set_layout(settings.layout, settings.checksum, delta=settings.delta)
            self._layout = settings.layout

    def _open(self) -> Connection:
        if self._connection is None:
            raise NotConnected("this worker is not connected: call connect(worker_idx=…) first")
        return self._connection

    # --- messages ---

    def attach(self, handler: MessageHandler) -> None:
        """See ``ReceiveChannel``; processes messages that have arrived already."""
        while self._unread:
            if not handler.on_readable():
                return  # it has closed the connection
        try:
            self._open().attach(handler)
        except ConnectionError as error:
            raise _went_away(self._worker, error) from error

    def detach(self, handler: MessageHandler) -> None:
        """See ``ReceiveChannel``. A call of ``receive_weights`` is ended."""
        if isinstance(self._reader, BlockingReader) and os.getpid() == self._creator:
            self._reader.end_call()
        if self._connection is not None:
            self._connection.detach(handler)

    @property
    def newest_version(self) -> int:
        """See ``RequestChannel``."""
        reader = self._reader
        return reader.newest_version if isinstance(reader, ArenaReader) else self._newest

    def request_newest(self) -> int:
        """See ``RequestChannel``."""
        if self._connection is None or self.arena is not None:
            return 0
        self._requests += 1
        self._send(Message(Kind.REQUEST, self._worker, self._requests))
        return self._requests

    def sender_has_ended(self) -> bool:
        """See ``ReceiveChannel``."""
        return self._connection is not None and self._connection.has_ended()

    def receive_event(self) -> Event | None:
        """See ``ReceiveChannel``."""
        message = self._unread.popleft() if self._unread else self._open().receive()
        if message is None or message.kind is Kind.LEAVE:
            _log.debug("worker %d: the sender %s", self._worker, "has shut down" if message else "is gone")
            return Closed(finished=message is not None and message.version == 1)
        reason = ""
        try:
            return self._event_of(message)
        except ConnectionError as error:
            reason = str(error)
            _log.debug("worker %d: %s", self._worker, reason)
        except ValueError as error:
            self.answer(Ack(self._worker, ANY_VERSION, f"it got an invalid message from the sender: {error}"))
        except Exception:  # noqa: BLE001  no memory for a buffer, for example: the sender raises it
            self.answer(Ack(self._worker, ANY_VERSION, traceback.format_exc()))
        if self._connection is not None:
            _send_leave(self._connection, reason)
            self._connection.interrupt()  # not close(): the fast path may still use the descriptor
        return Closed()

    def _event_of(self, message: Message) -> Event | None:
        """Process a message; return its event, or None if that is all.

        Raises:
            ValueError: it is malformed, or unexpected.
            ConnectionError: the transport has broken.
        """
        reader, kind = self._reader, message.kind
        if reader is None:
            raise ValueError(f"a message {kind.name} before the handshake")
        if kind is Kind.UPDATE:
            if isinstance(reader, TransportReader):
                return reader.on_update(message.version, message.payload)
            return Published()  # version and slot are in the published word
        if kind is Kind.UPDATE_WITH_WEIGHTS and isinstance(reader, FlatReader):
            return reader.on_update_with_weights(message.version, message.payload)
        if kind is Kind.PREPARE:
            return reader.on_prepare(message.version, message.payload)
        if kind in (Kind.COMMIT, Kind.ABORT):  # a prepared slot of the arena is committed by the published word alone
            commit = kind is Kind.COMMIT
            if isinstance(reader, TransportReader) and reader.on_decision(message.version, commit):
                error = "it did not arrive: send_weights has raised on the sender"
                return Failed(message.version, error, sender_knows=True)
            return Decision(message.version, commit)
        if kind is Kind.CHECK_LAYOUT:
            return CheckLayout(message.version, layout_in(message.payload))
        if kind is Kind.NEWEST:
            (request,) = unpack_exactly(REQUEST_NUMBER, message.payload)
            self._newest = max(self._newest, message.version)
            return Newest(message.version, request)
        if kind is Kind.LAYOUT:
            self._set_layout(reader, SenderSettings.load(message.payload))
        elif kind is Kind.BEGIN_RECEIVE and isinstance(reader, BlockingReader):
            reader.on_begin_receive(message.version, message.payload)
        elif kind is Kind.DELTA and isinstance(reader, TransportReader):
            reader.on_difference(message.version, message.payload)
        elif kind is Kind.RESEND and isinstance(reader, TransportReader):
            if reader.last_answer is not None:
                ack, prepared = reader.last_answer
                self._open().send(Message.answer(ack, prepared=prepared))
        elif kind is not Kind.SETUP_KEY:  # one that arrives after the set-up of the transport has no effect
            raise ValueError(f"an unexpected message {kind.name}")
        return None

    # --- updates ---

    def poll_update(self) -> Update | None:
        """See ``ReceiveChannel``."""
        return None if self._reader is None else self._reader.poll_update()

    def on_installed(self, update: Update, error: str) -> None:
        """See ``ReceiveChannel``."""
        reader = self._reader
        if isinstance(reader, TransportReader):  # for RESEND, also if the update is not acknowledged
            reader.last_answer = Ack(self._worker, update.version, error), False
        if reader is not None:
            reader.on_installed(update, error)

    def answer(self, ack: Ack, *, prepared: bool = False) -> None:
        """See ``ReceiveChannel``."""
        reader = self._reader
        if isinstance(reader, TransportReader):
            reader.last_answer = ack, prepared
        self._send(Message.answer(ack, prepared=prepared))
        if isinstance(reader, FlatReader):
            reader.receive_ahead()

    def _send(self, message: Message) -> None:
        """Send; if the sender is gone, the receiver thread will notice."""
        arena = self.arena
        with suppress(ConnectionError):
            self._open().send(message)
        if arena is not None:
            arena.on_sent()

    def close(self) -> None:
        """See ``ReceiveChannel``."""
        if self._pending is not None:
            self._pending.close()
            self._pending = None
        if self._connection is not None:
            _leave(self._connection)
            self._connection = None
        inherited = os.getpid() != self._creator and isinstance(self._reader, TransportReader)
        if self._reader is not None and not inherited:  # the parent of a forked child goes on using its transport
            self._reader.close()
            self._reader = None
        self._unread.clear()
        self._layout = None


def _went_away(worker: int, cause: ConnectionError) -> NotConnected:
    return NotConnected(f"worker {worker}: the sender went away while this worker connected: {cause}")


def _leave(connection: Connection, reason: str = "") -> None:
    """Close a connection, after a message that this is on purpose, and why."""
    try:
        _send_leave(connection, reason)
    finally:
        connection.close()


def _send_leave(connection: Connection, reason: str) -> None:
    with suppress(ConnectionError):
        connection.send(Message(Kind.LEAVE, payload=reason.encode(errors="backslashreplace")))
