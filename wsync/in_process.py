"""Both ends in one process: nothing has to be carried, and an update goes through the gate into the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor

from wsync.control.receiver_thread import MessageHandler
from wsync.gate import process_gate
from wsync.receiving import prepared_updates
from wsync.receiving.events import CheckLayout, Event, Prepare
from wsync.receiving.updating import ModelUpdater
from wsync.sending.protocols import ConnectionlessChannel
from wsync.types import Ack, Update
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer


class InProcessChannel(ConnectionlessChannel):
    """A ``TransactionChannel`` and a ``ReceiveChannel`` at once; worker 0 is this process.

    Weights are packed into one private buffer, and copied from there into the model inside the gate. Every method is
    called by the thread that calls the scheme; ``poll_update``, ``on_installed`` and ``answer`` also by a thread that
    runs a forward, if it enters the gate first.

    Args:
        connect: connects the receiver, and returns its updater; called when the sender connects.
    """

    arena = None
    binds = False
    first_version = 1  # the one that the sender's `connect` installs, after this end has connected

    def __init__(self, connect: Callable[[], ModelUpdater]) -> None:
        self._connect_updater = connect
        self.layout: Layout | None = None
        self.workers: Collection[int] = (0,)
        self._buffer: Buffer | None = None
        self._pending: Update | None = None
        self._published = False
        self._updater: ModelUpdater | None = None
        self._acks: list[Ack] = []

    # --- SendChannel ---

    def _connected(self) -> ModelUpdater:
        assert self._updater is not None, "wait_for_workers() comes first"
        return self._updater

    def check_layout(self, layout: Layout, version: int) -> None:
        """See ``SendChannel``."""
        self._connected().process(CheckLayout(version, layout))

    def set_layout(self, layout: Layout) -> None:
        """See ``SendChannel``."""
        self.layout = layout
        self._buffer = Buffer.new(layout)

    def wait_for_workers(self, workers: Collection[int], sentinels: Mapping[int, int], deadline: float | None) -> None:
        """See ``SendChannel``: connect the receiver, unless that has been done."""
        if self._updater is None:
            self._updater = self._connect_updater()

    def reserve(self, workers: Collection[int], deadline: float | None) -> Buffer:
        """See ``SendChannel``: the one buffer, to which the model is never bound.

        Raises:
            RuntimeError: called inside the gate, where nothing is installed.
        """
        assert self._buffer is not None, "set_layout() comes first"
        if process_gate().held_here:
            raise RuntimeError("call send() outside any forward and any wsync.gate() block")
        with process_gate().gate_state.lock:
            self._pending = None  # of a send that a signal handler has interrupted
        return self._buffer

    def newest_views(self) -> Sequence[Tensor] | None:
        """See ``SendChannel``."""
        return self._buffer.views if self._buffer and self._published else None

    def release(self, buffers: Sequence[Buffer]) -> None:
        """See ``SendChannel``: the buffer has values that were not published."""
        if buffers:
            self._published = False

    def publish(self, buffer: Buffer, version: int, extra: bytes, workers: Collection[int], acknowledge: bool) -> None:
        """See ``SendChannel``; waits for a forward that is running."""
        self._pending, self._published = Update(version, buffer.views, extra), True
        process_gate().call_without_forward(bool)

    def prepare(self, buffer: Buffer, version: int, extra: bytes, workers: Collection[int], transaction: int) -> None:
        """See ``TransactionChannel``."""
        self._published = False  # until the commit, the buffer has a version that may be aborted
        self._connected().process(Prepare(transaction, Update(version, buffer.views, extra)))

    def commit(self, transaction: int) -> None:
        """See ``TransactionChannel``: all models at once; for the second one nothing is left to do."""
        process_gate().call_without_forward(prepared_updates.decide, transaction, True)
        self._published = True

    def abort(self, transaction: int) -> None:
        """See ``TransactionChannel``."""
        process_gate().call_without_forward(prepared_updates.decide, transaction, False)

    def wait_acks(self, workers: Collection[int], version: int, deadline: float | None) -> list[Ack]:
        """See ``SendChannel``."""
        acks = [ack for ack in self._acks if ack.version >= version][-1:]
        if acks:
            self._acks.clear()
        return acks

    # --- ReceiveChannel: there is no connection, so its first methods have nothing to do ---

    def begin_connect(self, worker_idx: int, deadline: float | None) -> Sequence[int]:
        """See ``ReceiveChannel``: the sender is in this process."""
        return ()

    def connect(self, worker_idx: int, deadline: float | None) -> None:
        """See ``ReceiveChannel``: the sender is in this process."""

    def attach(self, handler: MessageHandler) -> None:
        """See ``ReceiveChannel``: the sender enters the gate itself."""

    def detach(self, handler: MessageHandler) -> None:
        """See ``ReceiveChannel``."""

    def receive_event(self) -> Event | None:
        """See ``ReceiveChannel``: there are no messages."""
        return None

    def sender_has_ended(self) -> bool:
        """See ``ReceiveChannel``."""
        return False

    def poll_update(self) -> Update | None:
        """See ``ReceiveChannel``."""
        return self._pending

    def on_installed(self, update: Update, error: str) -> None:
        """See ``ReceiveChannel``: the model has memory of its own."""
        self._pending = None

    def answer(self, ack: Ack, *, prepared: bool = False) -> None:
        """See ``ReceiveChannel``."""
        self._acks.append(ack)

    def carried_bytes(self, version: int) -> int:
        """See ``SendChannel``."""
        return self._buffer.flat.numel() if self._buffer else 0

    def close(self, *, finished: bool = False) -> None:
        """See ``SendChannel`` and ``ReceiveChannel``."""
        self._buffer = self._updater = None
