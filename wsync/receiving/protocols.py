"""The interfaces between a ``Receiver`` and the channel that delivers its updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from wsync.control.receiver_thread import MessageHandler
from wsync.loops.gate_lock import Feed
from wsync.loops.worker_slot import SlotReceiver
from wsync.receiving.events import Event
from wsync.shm.registered import RegisteredView
from wsync.types import Ack, Update
from wsync.weights.binding import Binding
from wsync.weights.layout import Layout


class Poller(Feed, MessageHandler, Protocol):
    """A ``Receiver``, or the ``WorkerSlot`` in its place.

    Registered twice: with the gate (polled before each forward) and with the receiver thread (called per message).
    """


class UpdateReceiver(SlotReceiver, Protocol):
    """A ``ModelUpdater``, as the modules of this folder use it."""

    def process(self, events: Sequence[Event]) -> bool:
        """Process events, outside the gate; False when there will be no more."""
        ...

    def install(self, update: Update) -> None:
        """Install a committed update in the model. Called inside the gate."""
        ...


class ReceiveChannel(Protocol):
    """A worker's channel to its sender: ``SenderChannel``, ``InProcessChannel`` or ``StoreReceiveChannel``.

    It is called by the thread that connects or shuts down, by the acting thread (which runs the model's forward) and by
    the receiver thread (with RPC: the thread of the incoming call). Each method states by which of them, and whether
    the gate is held. Without ``Raises`` a method raises nothing by design.
    """

    @property
    def layout(self) -> Layout | None:
        """The layout of the weights; None until the sender has some."""
        ...

    @property
    def first_version(self) -> int:
        """The version that the sender delivers as this worker connects; 0 for none. Known once connected."""
        ...

    @property
    def binds(self) -> bool:
        """Whether parameters may be bound to the memory of an update. Known once connected."""
        ...

    def registered(self) -> RegisteredView | None:
        """Return the user's registered buffers, to which the model stays bound, if any.

        Called once, by the connecting thread, outside the gate.
        """
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
            NotConnected: there is no sender, or it refused this worker.
            SyncTimeout: it did not answer in time.
        """
        ...

    def poller(self, receiver: UpdateReceiver) -> Poller:
        """Return the object to register with the gate and the receiver thread.

        Called once, when connected, by the connecting thread, outside the gate.
        """
        ...

    def enable_fast_path(self, binding: Binding) -> None:
        """Let the ``Poller`` install the next update itself, if possible.

        Called after each installed update, inside the gate, by the thread that has installed it.
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
        """Undo ``attach``. On return no call of the handler is running, except one that this call is part of.

        Called outside the gate, by the thread that shuts down.
        """
        ...

    def receive_events(self) -> Sequence[Event]:
        """Read one message and return its events.

        Called when the connection is readable, by the receiver thread, outside the gate.
        """
        ...

    def fetch_newest(self) -> Sequence[Event]:
        """Stage the newest version now. Called outside the gate, by a thread in ``pull``.

        A sender that announces its updates has nothing more to give: the result is empty.
        """
        ...

    def newest_version(self) -> int:
        """Return the newest version that is known to be available; 0 for none. Called inside the gate, per forward.

        Only asked for where workers fetch.
        """
        ...

    def request_newest(self) -> int:
        """Request the newest version, where it has to be sent. Called with the gate's bare lock.

        Returns:
            The number of the request, which a ``Newest`` event answers; 0 if there is nothing to wait for.
        """
        ...

    def sender_is_alive(self) -> bool:
        """Return False if the sender is known to be gone.

        Called every few seconds by a thread in ``receive``, outside the gate.
        """
        ...

    def set_wakeups(self, wanted: bool) -> None:
        """Set whether the sender must wake this worker for an update without acknowledgement. Called by any thread."""
        ...

    def hold_previous(self) -> None:
        """Keep the previous version's slot until the next successful install, so that a failed one can roll back.

        Called once, when the layout is known: by the connecting thread outside the gate, or before the first install
        inside it.
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

    def forward_ended(self) -> None:
        """Release the slot that the forward used. Idempotent.

        Called inside the gate, after each forward by the acting thread, and by the thread that shuts down.
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


class UpdateReader(Protocol):
    """How a connected worker reads the weights: ``ArenaReader``, ``FlatReader`` or ``BackendReader``.

    Called by the worker's channel. ``published``, ``fetch``, ``prepare`` and ``decide`` are called once per message, by
    the thread that connects and then by the receiver thread. They may raise ValueError (the message is malformed) or
    ConnectionError (the transport has broken).

    Attributes:
        binds: see ``ReceiveChannel``.
    """

    binds: bool

    def set_layout(self, layout: Layout, checksum: bool | None, *, delta: bool) -> None:
        """Use this layout from now on.

        Called once, outside the gate: by the connecting thread, or by the receiver thread while the acting thread may
        poll.

        Args:
            layout: of the weights.
            checksum: see ``SenderSettings``.
            delta: see ``SenderSettings``.
        """
        ...

    def poller(self, receiver: UpdateReceiver) -> Poller:
        """See ``ReceiveChannel``."""
        ...

    def enable_fast_path(self, binding: Binding, socket_fd: int) -> None:
        """See ``ReceiveChannel``. ``socket_fd``: of the connection's stream socket, or -1."""
        ...

    def disable_fast_path(self) -> None:
        """The receiver installs the next updates, until ``enable_fast_path``."""
        ...

    def published(self, version: int, payload: bytes) -> Sequence[Event]:
        """Return the events of an ``UPDATE`` message."""
        ...

    def fetch(self, version: int, payload: bytes) -> Sequence[Event]:
        """Return the events of a ``FETCH`` message."""
        ...

    def take_difference(self, version: int, payload: bytes) -> Sequence[Event]:
        """Return the events of a ``DELTA`` message."""
        ...

    def prepare(self, version: int, payload: bytes) -> Sequence[Event]:
        """Return the events of a ``PREPARE`` message."""
        ...

    def decide(self, transaction: int, commit: bool) -> None:
        """Process a ``COMMIT`` or ``ABORT`` message."""
        ...

    def set_wakeups(self, wanted: bool) -> None:
        """See ``ReceiveChannel``."""
        ...

    def hold_previous(self) -> None:
        """See ``ReceiveChannel``."""
        ...

    def poll_update(self) -> Update | None:
        """See ``ReceiveChannel``."""
        ...

    def on_installed(self, update: Update, error: str) -> None:
        """See ``ReceiveChannel``."""
        ...

    def forward_ended(self) -> bool:
        """Release the slot that the forward used; return whether the sender waits for a message about it."""
        ...

    def answered(self) -> None:
        """Called after each acknowledgement: the sender may send the next version."""
        ...

    def close(self) -> None:
        """Release everything. Idempotent."""
        ...
