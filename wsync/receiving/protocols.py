"""The interfaces between a receiver and the channel that delivers its updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from wsync.control.receiver_thread import MessageHandler
from wsync.loops.gate_lock import Feed
from wsync.types import Ack, Update
from wsync.weights.binding import Binding
from wsync.weights.layout import Layout


@dataclass(frozen=True, slots=True)
class Published:
    """A version can be installed: enter the gate."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Check an update and keep it for the transaction's commit."""

    transaction: int
    update: Update


@dataclass(frozen=True, slots=True)
class Decision:
    """Install (``commit``) or forget what was prepared in a transaction."""

    transaction: int
    commit: bool


@dataclass(frozen=True, slots=True)
class CheckLayout:
    """Answer, under ``version``, whether weights of a layout would fit."""

    version: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class Failed:
    """A version did not arrive: acknowledge it with the error."""

    version: int
    error: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The sender has gone."""


Event = Published | Prepare | Decision | CheckLayout | Failed | Closed


class Poller(Feed, MessageHandler, Protocol):
    """A receiver, or a compiled object in its place.

    Registered twice: with the gate (polled before each forward) and with the receiver thread (called per message).
    """


class UpdateReceiver(Poller, Protocol):
    """A ``Receiver``, as a compiled ``Poller`` uses it: every unusual update is passed to it.

    Attributes:
        version: the version that is installed in the model.
        told_at: when the update that is being installed was announced, on ``time.perf_counter``; 0.0 if it was not.
        waiting: how many threads wait in ``receive``; an update has to wake them.
    """

    version: int
    told_at: float
    waiting: int

    def process(self, events: Sequence[Event]) -> bool:
        """Process events, outside the gate; False when there will be no more."""
        ...


class ReceiveChannel(Protocol):
    """A worker's end of the connection to its sender.

    ``begin_connect``, ``connect``, ``attach``, ``detach`` and ``close`` are called outside the gate, by the thread that
    connects or shuts down. ``receive_events`` is called by the receiver thread (with RPC, by the thread of the incoming
    call). All others are called inside the gate, by the acting thread or the receiver thread.
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
        """The user's own buffers in shared memory to which the model stays bound; None without. Called by ``connect``."""
        ...

    def begin_connect(self, worker_idx: int, deadline: float | None) -> Sequence[int]:
        """Begin ``connect`` without waiting for the sender.

        Returns:
            File descriptors to poll; one of them is readable when the sender has answered, or has gone.

        Raises:
            NotConnected: no sender is there.
            SyncTimeout: the sender's queue of connection attempts stayed full.
        """
        ...

    def connect(self, worker_idx: int, deadline: float | None) -> None:
        """Connect; return when the sender has accepted this worker.

        Raises:
            NotConnected: no sender is there, or it refused; says why.
            SyncTimeout: it did not answer in time.
        """
        ...

    def poller(self, receiver: UpdateReceiver) -> Poller:
        """Return the object to register: ``receiver``, or a compiled one. Called once, from ``Receiver.connect``."""
        ...

    def enable_fast_path(self, binding: Binding) -> None:
        """Let the compiled ``Poller`` install the next usual update itself. Called after each installed update."""
        ...

    def attach(self, handler: MessageHandler) -> None:
        """From now on have ``handler.on_readable()`` called for each message, and when the sender has gone."""
        ...

    def detach(self, handler: MessageHandler) -> None:
        """Undo ``attach``; on return no call is in progress, unless the caller is inside it."""
        ...

    def receive_events(self) -> Sequence[Event]:
        """Read one message and return what it asks for. Called when the connection is readable."""
        ...

    def sender_is_alive(self) -> bool:
        """Return False if the sender is known to be gone. Called every few seconds while a thread waits for it."""
        ...

    def set_wakeups(self, wanted: bool) -> None:
        """Set whether the sender must wake this worker for an update that it need not acknowledge."""
        ...

    def hold_previous(self) -> None:
        """Keep the previous version's slot until the next successful install, so that a failed one can roll back."""
        ...

    def poll_update(self) -> Update | None:
        """Return the version that a forward which is about to start must use, if it is not installed yet."""
        ...

    def on_installed(self, update: Update, error: str) -> None:
        """Record the outcome of ``poll_update``, or of a committed ``Prepare``: installed, or not (``error``)."""
        ...

    def forward_ended(self) -> None:
        """Release what the forward used. Idempotent."""
        ...

    def answer(self, ack: Ack, *, prepared: bool = False) -> None:
        """Send an acknowledgement; nothing happens if the sender is gone."""
        ...

    def close(self) -> None:
        """Close the connection and release everything. Idempotent."""
        ...


class UpdateReader(Protocol):
    """How a connected worker reads the weights: ``ArenaReader`` or ``TransportReader``. Called by its channel.

    Attributes:
        binds: see ``ReceiveChannel``.
    """

    binds: bool

    def set_layout(self, layout: Layout, checksum: bool | None) -> None:
        """Called once, when the layout is known."""
        ...

    def poller(self, receiver: UpdateReceiver) -> Poller:
        """See ``ReceiveChannel``."""
        ...

    def enable_fast_path(self, binding: Binding, socket_fd: int) -> None:
        """See ``ReceiveChannel``. ``socket_fd``: of the connection's stream socket, or -1."""
        ...

    def disable_fast_path(self) -> None:
        """Leave the next updates to the receiver, until ``enable_fast_path``."""
        ...

    def published(self, version: int, payload: bytes) -> Sequence[Event]:
        """Return what an ``UPDATE`` message asks for."""
        ...

    def fetch(self, version: int, payload: bytes) -> Sequence[Event]:
        """Return what a ``FETCH`` message asks for."""
        ...

    def prepare(self, version: int, payload: bytes) -> Sequence[Event]:
        """Return what a ``PREPARE`` message asks for."""
        ...

    def decide(self, transaction: int, commit: bool) -> None:
        """A ``COMMIT`` or ``ABORT`` has arrived."""
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
        """Release what the forward used; return whether the sender waits for a message about it. Idempotent."""
        ...

    def answered(self) -> None:
        """An acknowledgement has been sent: the sender may send the next version."""
        ...

    def close(self) -> None:
        """Release everything. Idempotent."""
        ...
