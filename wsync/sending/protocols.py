"""The interface between a sender and the channel to its workers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from wsync.control.early_joins import EarlyJoin
from wsync.types import Ack
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer


class SendChannel(Protocol):
    """How a sender reaches the workers of one model.

    Implemented by ``SenderSideChannel``, ``InProcessChannel``, ``StoreSendChannel`` and ``EngineSendChannel``.

    All methods but ``give_up`` are called by the thread that calls the scheme, under the sender's lock; ``close`` also
    at exit.
    ``reserve``, ``publish`` and ``wait_acks`` are called once per update outside the fast path. What only some channels
    can do is in ``TransactionChannel`` and ``SenderSideChannel.fast_calls``.
    """

    @property
    def workers(self) -> Collection[int]:
        """The workers that are connected and alive."""
        ...

    def check_layout(self, layout: Layout, version: int) -> None:
        """Have the connected workers check whether weights of a layout fit; ``wait_acks`` returns their answers."""
        ...

    def set_layout(self, layout: Layout) -> None:
        """Allocate memory for weights of this layout, and send it to the workers. Called once, before ``reserve``.

        Raises:
            WeightSyncError: the machine has no memory left for it.
        """
        ...

    def wait_for_workers(self, workers: Collection[int], sentinels: Mapping[int, int], deadline: float | None) -> None:
        """Return when all of ``workers`` are connected. Called by ``connect`` and ``readmit``.

        Raises:
            SyncTimeout: names the workers that did not connect.
            WorkerDied: a worker's sentinel became readable first.
        """
        ...

    def pop_early_join(self, worker: int, sentinel: int | None) -> EarlyJoin | None:
        """Return a worker's early join, and forget it; None if there is none, or it is not the process of ``sentinel``.

        Called by ``readmit``.
        """
        ...

    def keep_early_join(self, worker: int, join: EarlyJoin) -> None:
        """Have the next ``pop_early_join`` return ``join``, if the worker is connected.

        Called by a ``readmit`` that ends at its timeout, or is interrupted by a signal: the next one then does not
        disconnect the worker.
        """
        ...

    def give_up(self, worker: int) -> None:
        """Record a worker's death, which ends a call in another thread that waits for it.

        Called by ``disconnect``, by any thread, without the sender's lock; several times while it waits for the lock.
        """
        ...

    def disconnect(self, worker: int) -> None:
        """Close the connection to a worker that is treated as dead. Later messages from it are ignored. Idempotent."""
        ...

    def reserve(self, workers: Collection[int], deadline: float | None) -> Buffer:
        """Return a buffer that no worker reads; may wait for a forward to end.

        Args:
            workers: the workers that get the update.
            deadline: when to give up.

        Raises:
            SyncTimeout: none was free in time; names the workers that use them.
            WeightSyncError: the machine has no memory left for one more.
        """
        ...

    def newest_views(self) -> Sequence[Tensor] | None:
        """Return the weights that all workers were sent last; None if some were sent others, or none.

        They may lie in the buffer that ``reserve`` returns next.
        """
        ...

    def release(self, buffers: Sequence[Buffer]) -> None:
        """End the reservation of buffers that were not published."""
        ...

    def publish(self, buffer: Buffer, version: int, extra: bytes, workers: Collection[int], acknowledge: bool) -> None:
        """Make a packed buffer the newest version of ``workers``, without waiting for them.

        ``workers`` may include absent ones: their replacements are given the version.
        """
        ...

    def process_arrived_messages(self) -> None:
        """Process the workers' messages that have arrived, without waiting. Called by each ``send`` that does not wait.

        Unread acknowledgements would fill the socket, and a worker would wait for room inside its gate. An update that
        still waits for a worker is from then on sent by the send-loop thread, as soon as the worker is ready.
        """
        ...

    def wait_acks(self, workers: Collection[int], version: int, deadline: float | None) -> list[Ack]:
        """Return one acknowledgement, error or death of each worker that answers ``version`` before ``deadline``."""
        ...

    def carried_bytes(self, version: int) -> int:
        """Return how many bytes of weights a worker is sent for the newest ``version``: the largest number of any.

        That is the size of the packed weights, unless all workers are sent only what has changed.
        """
        ...

    def close(self, *, finished: bool = False) -> None:
        """Close all connections and release everything. Idempotent.

        Args:
            finished: whether workers are sent ``LEAVE``; otherwise they treat the sender as dead.
        """
        ...


class ConnectionlessChannel:
    """Base of a ``SendChannel`` without connections to workers: these methods have nothing to do."""

    def keep_early_join(self, worker: int, join: EarlyJoin) -> None:
        """See ``SendChannel``."""

    def pop_early_join(self, worker: int, sentinel: int | None) -> EarlyJoin | None:
        """See ``SendChannel``: a worker is only connected when it is awaited."""
        return None

    def give_up(self, worker: int) -> None:
        """See ``SendChannel``: no call waits for a worker."""

    def disconnect(self, worker: int) -> None:
        """See ``SendChannel``: there is no connection."""

    def process_arrived_messages(self) -> None:
        """See ``SendChannel``: there are none."""


@runtime_checkable
class TransactionChannel(SendChannel, Protocol):
    """A channel to workers that can keep an update before use: ``SenderSideChannel`` and ``InProcessChannel``."""

    def prepare(self, buffer: Buffer, version: int, extra: bytes, workers: Collection[int], transaction: int) -> None:
        """Have ``workers`` check a packed buffer and keep it; ``wait_acks`` returns their answers."""
        ...

    def commit(self, transaction: int) -> None:
        """Have the workers install what they have prepared in a transaction, all its models together.

        Called again if a signal handler has raised in it, as ``abort`` is.
        """
        ...

    def abort(self, transaction: int) -> None:
        """Have the workers drop what they have prepared. Called if ``prepare`` was, even if that raised."""
        ...
