"""How an accepted worker reads its weights: from the sender's arena if it can be mapped, else from a transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wsync.control import Connection, Kind, Message
from wsync.control.settings import SenderSettings
from wsync.errors import NotConnected, WeightSyncError
from wsync.receiving.arena_reader import ArenaReader
from wsync.receiving.backend_reader import BackendReader
from wsync.receiving.flat_reader import FlatReader
from wsync.receiving.transport_reader import TransportReader
from wsync.shm.arena import WorkerArena, open_handle
from wsync.transforms.delta import require_zstandard
from wsync.transport import FlatTransport, TransportBackend, TransportFactory, require_transport
from wsync.transport_setup import TransportSetup
from wsync.weights.strategy import WeightStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderFactory:
    """Makes the reader of each of a worker's connections. Used by the connecting thread.

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
            fds: that came with the settings: the arena's two files, or none.
            deadline: of the set-up.

        Returns:
            The reader, and messages that arrived meanwhile.

        Raises:
            NotConnected: the arena cannot be mapped and there is no transport, or its set-up failed; or the sender
                sends differences, which cannot be read here.
            SyncTimeout: the transport was not set up in time.
        """
        files = (fds[0], fds[1]) if len(fds) == 2 else None
        if settings.arena_handle is not None:
            files = open_handle(settings.arena_handle) if self.arena else None
            connection.send(Message(Kind.ROUTE, worker, int(files is not None)))  # see ``Kind.ROUTE``
        if files is not None:
            arena = WorkerArena(settings.workers, files)
            return ArenaReader(arena, connection, worker, settings.generation, binds=self.binds_arena), ()
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

        def set_up() -> None:
            assert isinstance(transport, TransportBackend), "called unless it is a FlatTransport"
            transport.setup_connection_and_weights_on_receiver(worker_idx=worker, strategy=self.strategy)

        try:
            arrived = TransportSetup(connection, worker, deadline, transport, 1, settings.generation, set_up).wait()
        except WeightSyncError:
            raise
        except Exception as error:
            raise NotConnected(
                f"worker {worker}: the set-up of its transport raised {type(error).__name__}: {error}"
            ) from error
        if isinstance(transport, FlatTransport):
            return FlatReader(transport, binds=self.binds_buffers, timeout=self.timeout), arrived
        return BackendReader(transport, self.strategy, binds=self.binds_buffers, timeout=self.timeout), arrived
