"""What a worker's model is on, as its end of the line knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wsync.receiving.events import SlowPath

if TYPE_CHECKING:
    from wsync._native import Installer, Room


class Seat:
    """A worker's place in an arena. ``_native.Seat`` has the same state, and a fast path besides.

    Attributes:
        version: that the model has.
        slot: that the model is bound to; -1 if it has memory of its own.
        refused: the newest version that could not be installed.
        hold: whether the next version may be refused: then ``slot`` is kept safe between forwards as well.
        busy: whether a slot is in use.
    """

    __slots__ = ("_receiver", "busy", "hold", "refused", "slot", "version")

    def __init__(self) -> None:
        self.version = 0
        self.slot = -1
        self.refused = 0
        self.hold = False
        self.busy = False

    def follow(self, receiver: SlowPath, turnstile: Any) -> None:
        """Have ``receiver`` asked and told from now on."""
        self._receiver = receiver

    def enter(self) -> bool:
        """See ``gate.Feed``."""
        return self._receiver.enter()

    def leave(self) -> None:
        """See ``gate.Feed``."""
        self._receiver.leave()

    def on_readable(self) -> bool:
        """See ``receiver_thread.LineHandler``."""
        return self._receiver.on_readable()

    def take(self, words: memoryview, at: int) -> None:
        """The place's words are looked at by ``Switch``."""

    def arm(
        self,
        installer: Installer,
        rooms: list[Room | None],
        staged: dict[int, Any],
        fd: int,
        worker: int,
        retains: bool,
    ) -> None:
        """There is no faster path."""

    def disarm(self) -> None:
        """There is no faster path."""

    def quit(self) -> None:
        """There is no faster path."""
