"""The interface of the channel that delivers a worker's updates; and what only some channels have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from wsync.control.receiver_thread import MessageHandler
from wsync.receiving.arena_reader import ArenaReader
from wsync.receiving.events import Event
from wsync.types import Ack, Update
from wsync.weights.layout import Layout


class ReceiveChannel(Protocol):
    """A worker's channel to its sender: ``WorkerSideChannel``, ``InProcessChannel`` or ``StoreReceiveChannel``.

    It is called by the thread that connects or shuts down, by the acting thread (which runs the model's forward) and by
    the receiver thread. Each method states by which of them, and whether the gate is held. A method without a
    ``Raises`` section does not raise.
    """

    @property
    def layout(self) -> Layout | None:
        """The layout of the weights; None until the sender has some. If it changes, then in ``poll_update``."""
        ...

    @property
    def first_version(self) -> int:
        """The version that the sender delivers as this worker connects; 0 for none. Known once connected."""
        ...

    @property
    def binds(self) -> bool:
        """Whether parameters may be bound to the memory of an update. Known once connected."""
        ...

    @property
    def arena(self) -> ArenaReader | None:
        """The reader of the sender's arena; None if this worker does not use it, or is not connected."""
        ...

    def begin_connect(self, worker_idx: int, deadline: float | None) -> Sequence[int]:
        """Begin ``connect`` without waiting for the sender. Called outside the gate.

        Returns:
            File descriptors to poll; one of them is readable when the sender has answered, or has gone.

        Raises:
            NotConnected: there is no sender.
            SyncTimeout: the sender's queue of connection attempts stayed full.
        """
        ...

    def connect(self, worker_idx: int, deadline: float | None) -> None:
        """Connect; return when the sender has accepted this worker.

        Called outside the gate; by the receiver thread after ``begin_connect``.

        Raises:
            NotConnected: there is no sender, or it rejected this worker.
            SyncTimeout: it did not answer in time.
        """
        ...

    def attach(self, handler: MessageHandler) -> None:
        """From now on ``handler.on_readable()`` is called for each message, and when the sender exits.

        Called once, by the connecting thread, outside the gate.

        Raises:
            NotConnected: the sender has gone.
        """
        ...

    def detach(self, handler: MessageHandler) -> None:
        """Undo ``attach``. On return no call of the handler is running, unless the handler itself called ``detach``.

        Called outside the gate, by the thread that shuts down.
        """
        ...

    def receive_event(self) -> Event | None:
        """Read one message; return its event, or None if there is nothing to do.

        Called when the connection is readable, by the receiver thread, outside the gate.
        """
        ...

    def sender_has_ended(self) -> bool:
        """Return whether the sender has closed the connection; what it sent before may not be read yet.

        Called by ``connect`` in a worker that is connected already, outside the gate.
        """
        ...

    def poll_update(self) -> Update | None:
        """Return the version to install before the next forward; None if it is installed.

        Called inside the gate: per forward by the acting thread, per message by the receiver thread.
        """
        ...

    def on_installed(self, update: Update, error: str) -> None:
        """Record that an update was installed, or was not (``error``).

        Called once per update, inside the gate, by the thread that has installed it.
        """
        ...

    def answer(self, ack: Ack, *, prepared: bool = False) -> None:
        """Send an acknowledgement; nothing happens if the sender is gone.

        Called by any of the threads: inside the gate by the one that has installed or checked an update, outside it
        after a cascade or a failed ``connect``.
        """
        ...

    def close(self) -> None:
        """Close the connection and release everything. Idempotent.

        Called outside the gate, by the thread that connects or shuts down.
        """
        ...


class RequestChannel(ReceiveChannel, Protocol):
    """A channel from which a worker can request versions (``initiator="receiver"``)."""

    @property
    def newest_version(self) -> int:
        """The newest version that is known to be available; 0 for none. Read inside the gate, per forward."""
        ...

    def request_newest(self) -> int:
        """Request the newest version, where it has to be sent. Called with the gate's lock held, by any thread.

        Returns:
            The number of the request, which a ``Newest`` event answers; 0 if there is nothing to wait for.
        """
        ...


@runtime_checkable
class ReadsStore(Protocol):
    """A channel that reads versions from a store, which needs no running sender: ``StoreReceiveChannel``."""

    def fetch_newest(self) -> Event:
        """Read the newest version now; return its event.

        ``poll_update`` then returns the version. Called outside the gate, by a thread in ``pull``.

        Raises:
            WeightSyncError: it cannot be read.
        """
        ...
