"""A worker's end of a line: what a backend must say of it. All that backends share stands above, in ``receiver.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from wsync.receiving.events import Event, Follower, SlowPath
from wsync.receiving.receiver_thread import LineHandler
from wsync.types import Ack, Update
from wsync.weights.binding import Binding
from wsync.weights.layout import Layout


class ReceiverEnd(Protocol):
    """A worker's end."""

    @property
    def layout(self) -> Layout | None:
        """What the weights look like; None until the sender knows."""
        ...

    def knock(self, worker_idx: int, deadline: float | None) -> Sequence[int]:
        """Begin ``connect`` and do not wait for the sender: descriptors, one of which is readable when it has answered.

        Raises:
            NotConnected: no sender is there.
            SyncTimeout: there was no room at its door.
        """
        ...

    def connect(self, worker_idx: int, deadline: float | None) -> None:
        """The rendezvous: return when the sender has let this worker in.

        Raises:
            NotConnected: no sender is there, or it refused; the message says why.
            SyncTimeout: it did not answer in time.
        """
        ...

    def feed(self, receiver: SlowPath) -> Follower:
        """What the gate shall ask, and who is told: ``receiver``, or a faster path to the same."""
        ...

    def arm(self, binding: Binding) -> None:
        """The model took an update by ``binding``: the next may go a faster path, while nothing is staged."""
        ...

    def attach(self, receiver: LineHandler) -> None:
        """See to it that ``receiver.on_readable()`` is called when ``events`` has something, or the sender is gone."""
        ...

    def detach(self, receiver: LineHandler) -> None:
        """No more; return when no such call is under way, unless this is one."""
        ...

    def events(self) -> Sequence[Event]:
        """What the sender has said since."""
        ...

    def alive(self) -> bool:
        """Whether the sender is there, as far as one can tell; asked now and then while somebody waits for it.

        True where its death is an event that ``on_readable`` hears of.
        """
        ...

    def call(self, wanted: bool) -> None:
        """Whether this worker must be woken for an update that nobody waits for."""
        ...

    def may_refuse(self) -> None:
        """The model may refuse a version that has arrived whole: keep safe what it is on until it takes another."""
        ...

    def enter(self) -> Update | None:
        """A forward is about to start: the version that it must use, if that is not the installed one."""
        ...

    def installed(self, update: Update, error: str) -> None:
        """The outcome of an ``enter`` or of a decided stage: installed, or not (``error``)."""
        ...

    def leave(self) -> None:
        """The forward has ended; harmless when repeated."""
        ...

    def answer(self, ack: Ack, *, staged: bool = False) -> None:
        """Tell the sender; nothing happens if it is gone."""
        ...

    def close(self) -> None:
        """Let everything go; harmless when repeated."""
        ...
