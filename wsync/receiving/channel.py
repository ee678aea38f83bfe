"""A worker's end of the connection to its sender: messages, and the arena or a transport for the weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from wsync.control import Connection, Kind, Message
from wsync.control.handshake import SenderSettings, layout_in
from wsync.control.receiver_thread import MessageHandler
from wsync.deadlines import wait_readable
from wsync.errors import NotConnected, SyncTimeout, WeightSyncError
from wsync.forming import Forming, close_unformed, forming_deadline
from wsync.receiving.arena_reader import ArenaReader
from wsync.receiving.protocols import (
    CheckLayout,
    Closed,
    Decision,
    Event,
    Failed,
    Poller,
    UpdateReader,
    UpdateReceiver,
)
from wsync.receiving.transport_reader import TransportReader
from wsync.shm.arena import Arena, open_handle
from wsync.shm.registered import RegisteredView
from wsync.transport import FlatTransport, TransportFactory
from wsync.types import ANY_VERSION, Ack, Update
from wsync.weights.binding import Binding
from wsync.weights.layout import Layout
from wsync.weights.strategy import WeightStrategy

_log = logging.getLogger(__name__)


class SenderChannel:
    """A worker's end of one connection. Implements ``wsync.receiving.protocols.ReceiveChannel``.

    Args:
        dial: ``(worker, deadline) -> connection``.
        create_transport: the scheme's; None where all workers use the arena.
        strategy: the format in which a transport is given a buffer.
        arena: whether to use the sender's arena where it can be mapped.
        binds_arena: whether the model stays bound to the arena's slots; otherwise it copies.
        binds_buffers: whether the model stays bound to a transport's receive buffers.
        timeout: seconds that an announced version may take to arrive; None for no limit.
        connected: called with the worker's index when the sender has accepted it.
    """

    def __init__(
        self,
        dial: Callable[[int, float | None], Connection],
        create_transport: TransportFactory | None,
        strategy: WeightStrategy,
        *,
        arena: bool,
        binds_arena: bool,
        binds_buffers: bool,
        timeout: float | None,
        connected: Callable[[int], None],
    ) -> None:
        self._connected = connected
        self._dial = dial
        self._create_transport = create_transport
        self._strategy = strategy
        self._use_arena = arena
        self._binds_arena = binds_arena
        self._binds_buffers = binds_buffers
        self._timeout = timeout
        self._pending: Connection | None = None  # the sender has not accepted it yet
        self._connection: Connection | None = None
        self._reader: UpdateReader | None = None
        self._worker = -1
        self._layout: Layout | None = None
        self.first_version = 0
        self._wakeups = True
        self._last_answer: Message | None = None

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
        self._worker = worker_idx
        try:
            self._join(connection, deadline)
        except BaseException:
            _leave(connection)
            if self._reader is not None:
                self._reader.close()
                self._reader = None
            raise
        self._connection = connection
        self._connected(worker_idx)
        _log.debug("worker %d is connected to %s", worker_idx, connection.peer)

    def _join(self, connection: Connection, deadline: float | None) -> None:
        accepted = self._wait_message(connection, deadline)
        if accepted.kind is not Kind.ACCEPTED:
            raise NotConnected(f"worker {self._worker} was refused: {accepted.payload.decode(errors='replace')}")
        self.first_version = accepted.version
        try:
            handshake = SenderSettings.load(accepted.payload)
            early = self._open_reader(connection, accepted, handshake, deadline)
            if handshake.layout is not None:
                self._set_layout(handshake)
            if accepted.version and isinstance(self._reader, TransportReader):  # the first weights come right now
                self._first_update(connection, early, deadline)
        except (WeightSyncError, ConnectionError):
            raise
        except ValueError as error:
            raise NotConnected(f"worker {self._worker} does not understand the sender: {error}") from error

    def _open_reader(
        self, connection: Connection, accepted: Message, handshake: SenderSettings, deadline: float | None
    ) -> Sequence[Message]:
        """Map the arena, or set up the transport; return messages that arrived meanwhile."""
        if self._worker >= handshake.workers:
            raise ValueError(f"there is no worker {self._worker} of {handshake.workers}")
        fds = (accepted.fds[0], accepted.fds[1]) if len(accepted.fds) == 2 else None
        if handshake.memory is not None:
            fds = open_handle(handshake.memory) if self._use_arena else None
            connection.send(Message(Kind.JOINED, self._worker, int(fds is not None)))
        if fds is not None:
            arena = Arena(handshake.workers, fds)
            self._reader = ArenaReader(arena, self._worker, binds=self._binds_arena)
            self._reader.set_wakeups(self._wakeups)
            return ()
        if self._create_transport is None:
            raise NotConnected(
                f"worker {self._worker} cannot use the sender's shared memory, and its scheme has no other transport"
            )
        return self._open_transport(connection, self._create_transport, handshake.generation, deadline)

    def _open_transport(
        self, connection: Connection, create: TransportFactory, generation: int, deadline: float | None
    ) -> Sequence[Message]:
        transport, worker, strategy = create(self._worker), self._worker, self._strategy
        if isinstance(transport, FlatTransport):
            latest, host = forming_deadline(deadline), connection.local_host
            forming = Forming(
                connection, worker, deadline, lambda store: transport.form(store, 1, generation, host, latest)
            )
        else:

            def set_up(_: object) -> None:
                transport.setup_connection_and_weights_on_receiver(worker_idx=worker, strategy=strategy)

            forming = Forming(connection, worker, deadline, set_up)
        try:
            early = forming.wait()
        except WeightSyncError:
            close_unformed(transport)
            raise
        except Exception as error:
            close_unformed(transport)
            raise NotConnected(
                f"worker {worker}: the set-up of its transport raised {type(error).__name__}: {error}"
            ) from error
        finally:
            forming.close()
        self._reader = TransportReader(transport, strategy, binds=self._binds_buffers, timeout=self._timeout)
        return early

    def _set_layout(self, handshake: SenderSettings) -> None:
        if self._reader is None or handshake.layout is None:
            raise ValueError("a handshake without a layout")
        self._reader.set_layout(handshake.layout, handshake.checksum)
        self._layout = handshake.layout

    def _first_update(self, connection: Connection, early: Sequence[Message], deadline: float | None) -> None:
        """Receive the version that the sender sends to a worker as it joins; it is installed by the first ``poll``."""
        waiting = list(early)
        while True:
            message = waiting.pop(0) if waiting else self._wait_message(connection, deadline)
            for event in self._events(message):
                if isinstance(event, Closed):
                    raise NotConnected(f"worker {self._worker}: the sender has gone")
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
        # A forked child may keep the dead sender's socket open: then only the pidfd shows that it is gone.
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
        self._open().attach(handler)

    def detach(self, handler: MessageHandler) -> None:
        """See ``ReceiveChannel``."""
        if self._connection is not None:
            self._connection.detach(handler)

    def sender_is_alive(self) -> bool:
        """See ``ReceiveChannel``."""
        return self._connection is None or self._connection.peer_is_alive()

    def receive_events(self) -> Sequence[Event]:
        """See ``ReceiveChannel``."""
        return self._events(self._open().receive())

    def _events(self, message: Message | None) -> Sequence[Event]:
        if message is None or message.kind is Kind.LEAVE:
            _log.debug("worker %d: the sender %s", self._worker, "has shut down" if message else "is gone")
            return [Closed()]
        try:
            return self._understand(message)
        except ConnectionError as error:
            _log.debug("worker %d: %s", self._worker, error)
        except ValueError as error:
            self.answer(Ack(self._worker, ANY_VERSION, f"it does not understand the sender: {error}"))
        if self._connection is not None:
            _leave(self._connection)
        return [Closed()]

    def _understand(self, message: Message) -> Sequence[Event]:
        """Return what a message asks for.

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
        if kind is Kind.RESEND:
            if self._last_answer is not None:
                self._open().send(self._last_answer)
            return []
        raise ValueError(f"an unexpected message {kind.name}")

    # --- called inside the gate ---

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
        self._last_answer = Message.answer(Ack(self._worker, update.version, error))
        if self._reader is None:
            return
        self._reader.on_installed(update, error)
        if (
            isinstance(self._reader, ArenaReader) and not self._reader.binds
        ):  # it has copied, and needs the slot no more
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
        """Send; if the sender is gone, the receiver thread notices that."""
        try:
            connection = self._open()
            connection.send(message)
        except ConnectionError:
            return
        if connection.busy and self._reader is not None:  # the fast path writes to the socket directly
            self._reader.disable_fast_path()

    def close(self) -> None:
        """See ``ReceiveChannel``."""
        if self._pending is not None:
            _leave(self._pending)  # over RPC, nothing else tells the sender that this worker has gone
            self._pending = None
        if self._connection is not None:
            _leave(self._connection)
            self._connection = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._layout = self._last_answer = None


def _leave(connection: Connection) -> None:
    """Close a connection, and tell the other end that this is on purpose."""
    try:
        connection.send(Message(Kind.LEAVE))
    except ConnectionError:
        pass
    finally:
        connection.close()
