"""A worker's side of the handshake: from the connection that it has made to a reader of weights, and the first ones.

All is called by the connecting thread. Weights are read from the sender's arena if it can be mapped, else from a
transport.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wsync.control import Connection, Kind, Message
from wsync.control.messages import why_ended
from wsync.control.settings import SenderSettings
from wsync.deadlines import wait_readable
from wsync.errors import NotConnected, SyncTimeout, WeightSyncError
from wsync.receiving.arena_reader import ArenaReader
from wsync.receiving.blocking_reader import BlockingReader
from wsync.receiving.events import Event, Failed, Newest, Published
from wsync.receiving.flat_reader import FlatReader
from wsync.receiving.transport_reader import TransportReader
from wsync.shm.arena import WorkerArena
from wsync.shm.memory import open_handle
from wsync.transforms.delta import require_zstandard
from wsync.transport import FlatTransport, TransportFactory, require_transport
from wsync.transport_setup import TransportSetup
from wsync.types import Ack
from wsync.weights.strategy import WeightStrategy


def wait_accepted(connection: Connection, worker: int, deadline: float | None) -> Message:
    """Return the ``ACCEPTED`` message, which must arrive by ``deadline``.

    Raises:
        NotConnected: the sender rejected this worker, or has gone.
        SyncTimeout: it did not answer in time.
    """
    message = _wait_message(connection, worker, deadline)
    if message.kind is not Kind.ACCEPTED:
        raise NotConnected(f"worker {worker} was rejected by the sender: {message.payload.decode(errors='replace')}")
    return message


def settings_in(accepted: Message, worker: int) -> SenderSettings:
    """Return the settings in an ``ACCEPTED`` message; if they are invalid, close the descriptors that came along.

    Raises:
        ValueError: they are malformed, or not for this worker.
    """
    try:
        settings = SenderSettings.load(accepted.payload)
        if worker >= settings.num_workers:
            raise ValueError(f"there is no worker {worker} of {settings.num_workers}")
    except ValueError:
        for descriptor in accepted.fds:
            os.close(descriptor)
        raise
    return settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderFactory:
    """Makes the reader of each of a worker's connections.

    Attributes:
        create_transport: the scheme's; None where all workers use the arena.
        strategy: the format in which a transport is given a buffer.
        arena: whether to use the sender's arena where it can be mapped.
        binds_arena: whether the model stays bound to the arena's slots; otherwise it copies.
        binds_buffers: whether the model stays bound to a transport's receive buffers.
        timeout: seconds that an announced version may take to arrive; None for no limit.
    """

    create_transport: TransportFactory | None
    strategy: WeightStrategy
    arena: bool
    binds_arena: bool
    binds_buffers: bool
    timeout: float | None

    def open(
        self,
        connection: Connection,
        worker: int,
        settings: SenderSettings,
        fds: Sequence[int],
        deadline: float | None,
    ) -> tuple[ArenaReader | TransportReader, Sequence[Message]]:
        """Map the arena, or set up the transport.

        Args:
            connection: accepted by the sender.
            worker: the worker's index.
            settings: the sender's.
            fds: the descriptors that came with the settings: the arena's two files, or none.
            deadline: the deadline of the set-up.

        Returns:
            The reader, and messages that arrived meanwhile.

        Raises:
            NotConnected: the arena cannot be mapped and there is no transport, or its set-up failed; or the sender
                sends differences, which cannot be read here.
            SyncTimeout: the transport was not set up in time.
        """
        arena = self._open_arena(connection, worker, settings, fds)
        if arena is not None:
            return ArenaReader(arena, connection, worker, settings.connection_number, binds=self.binds_arena), ()
        if self.create_transport is None:
            raise NotConnected(
                f"worker {worker} cannot use the sender's shared memory, and its scheme has no other transport"
            )
        if settings.delta:
            try:
                require_zstandard()
            except ImportError as error:
                raise NotConnected(f"worker {worker}: {error}") from error
        transport = require_transport(self.create_transport(worker))
        try:
            number = settings.connection_number
            arrived = TransportSetup(connection, worker, deadline, transport, 1, number, self.strategy).wait()
        except WeightSyncError:
            raise
        except Exception as error:
            raise NotConnected(
                f"worker {worker}: the set-up of its transport raised {type(error).__name__}: {error}"
            ) from error
        if isinstance(transport, FlatTransport):
            return FlatReader(transport, binds=self.binds_buffers, timeout=self.timeout), arrived
        return BlockingReader(transport, self.strategy, binds=self.binds_buffers, timeout=self.timeout), arrived

    def _open_arena(
        self, connection: Connection, worker: int, settings: SenderSettings, fds: Sequence[int]
    ) -> WorkerArena | None:
        """Map the arena; None if there is none, or it cannot be mapped here. Closes its files if this raises."""
        files = (fds[0], fds[1]) if len(fds) == 2 else None
        if settings.arena_handle is not None and self.arena:
            files = open_handle(settings.arena_handle)
        try:
            if settings.arena_handle is not None:
                connection.send(Message(Kind.ROUTE, worker, int(files is not None)))  # see ``Kind.ROUTE``
            return None if files is None else WorkerArena(settings.num_workers, files)
        except BaseException:  # also Ctrl-C: the descriptors have no other owner yet
            for descriptor in files or ():
                os.close(descriptor)
            raise


def wait_first_update(
    connection: Connection,
    worker: int,
    deadline: float | None,
    unread: deque[Message],
    event_of: Callable[[Message], Event | None],
) -> bool:
    """Receive the version that the sender sends at once; the first ``poll_update`` returns it.

    Args:
        connection: the connection to the sender.
        worker: the worker's index.
        deadline: by when each message must have arrived; None for no limit.
        unread: messages that arrived while the transport was set up; those that this function processes are removed.
        event_of: processes a message.

    Returns:
        Whether it has arrived; False if ``send_weights`` has raised, which the sender reports.

    Raises:
        WeightSyncError: the version did not arrive.
        ValueError: a message is malformed, or unexpected.
        NotConnected: the sender has gone.
        SyncTimeout: it did not send in time.
    """
    while True:
        message = unread.popleft() if unread else _wait_message(connection, worker, deadline)
        event = event_of(message)
        if isinstance(event, Published):
            return True
        if message.kind is Kind.ABORT:
            return False
        if isinstance(event, Failed):
            connection.send(Message.answer(Ack(worker, event.version, event.error)))
            raise WeightSyncError(f"worker {worker} did not get its first weights:\n{event.error}")
        if event is not None and not isinstance(event, Newest):  # of a version that was sent meanwhile
            raise ValueError(f"an unexpected message {message.kind.name}")


def _wait_message(connection: Connection, worker: int, deadline: float | None) -> Message:
    ready = wait_readable(connection.descriptors, deadline)
    if not ready:
        raise SyncTimeout(f"worker {worker}: the sender did not answer: does it call connect() or readmit()?")
    # A forked child of a dead sender may keep the socket open: then only the pidfd is readable.
    message = connection.receive() if connection.fileno() in ready else None
    if message is None or message.kind is Kind.LEAVE:
        reason = why_ended(connection.peer_name, message)
        raise NotConnected(f"worker {worker}: the sender went away while this worker connected: {reason}")
    return message
