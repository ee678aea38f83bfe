"""The fast path of a worker's updates over a network: in as few steps as there are, while they are usual."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from wsync import native
from wsync.network.landing import Landing
from wsync.receiving.events import Event, SlowPath
from wsync.receiving.gate import process_gate
from wsync.receiving.staged import staged
from wsync.types import Update
from wsync.wire.checksum import seal
from wsync.wire.words import Kind, Line, Message


class End(Protocol):
    """A worker's end, as its fast path sees it."""

    landing: Landing
    worker: int
    pending: Update | None
    said: Message | None

    def understand(self, message: Message | None, index: int | None = None) -> Sequence[Event]:
        """What a message says; ``index`` is the buffer in which what it announces has arrived, if it has."""
        ...

    def give_up(self) -> Sequence[Event]:
        """Hang up."""
        ...

    def stay(self, index: int) -> None:
        """The model has what is in a buffer."""
        ...

    def say(self, answer: Message) -> None:
        """Tell the sender, and be ready for the next version."""
        ...


class GroupFastReceiver:
    """Takes updates without extra state, as long as the model is what it was (a ``Follower``).

    All else takes the slow path, by what ``receiver`` does with what ``end`` understands.
    """

    def __init__(self, receiver: SlowPath, end: End, line: Line) -> None:
        self._receiver = receiver
        self._end = end
        self._line = line
        self._landing = end.landing
        self._go_through = process_gate().turnstile.go_through
        self._installer: native.Installer | None = None
        self._arrived: tuple[Message, int] | None = None  # and the buffer that it is in

    def arm(self, installer: native.Installer | None) -> None:
        """The model takes updates by ``installer``, while nothing is staged; None for the slow path."""
        self._installer = installer

    def on_readable(self) -> bool:
        """Do what the sender has said; False when it is gone."""
        receiver, end = self._receiver, self._end
        message = self._line.receive()
        if message is None or message.kind is not Kind.NEWS or self._installer is None:
            return receiver.follow(end.understand(message))
        try:
            index = self._landing.take(message.version)
        except RuntimeError:  # the line of tensors has broken, so there will be no more
            return receiver.follow(end.give_up())
        if index < 0:
            return True
        if not self._is_whole(message.payload, index):
            return receiver.follow(end.understand(message, index))
        receiver.told_at = time.perf_counter()
        self._arrived = message, index
        self._go_through()
        receiver.told_at = 0.0  # the acting thread may have been first
        return True

    def _is_whole(self, payload: bytes, index: int) -> bool:
        """Whether an update is all here, and undamaged, and nothing comes with it."""
        return payload == (seal(self._landing.berths[index].content) if self._landing.checksum else b"")

    def enter(self) -> bool:
        """Install what has arrived."""
        if self._arrived is None:
            return self._receiver.enter() if self._end.pending is not None else False
        started = time.perf_counter()
        receiver, installer, (message, index) = self._receiver, self._installer, self._arrived
        if installer is None or staged or receiver.waiting or not installer.install(self._landing.berths[index].views):
            self._end.understand(message, index)
            self._arrived = None
            return receiver.enter()
        told_at, receiver.told_at = receiver.told_at, 0.0
        receiver.version = message.version
        end = self._end
        end.stay(index)
        wait = started - told_at if told_at else 0.0
        answer = Message(Kind.ACK, end.worker, message.version, b"", wait, time.perf_counter() - started)
        end.said = answer  # and if a signal strikes before it is sent: the sender asks for what was said last
        self._arrived = None  # not before: a signal may strike between any two lines
        end.say(answer)
        return False

    def leave(self) -> None:
        """Nothing is borrowed."""
