"""The fast path of a worker's updates over a network: in as few steps as there are, while they are usual.

Who comes first takes an update: the thread that listens, or the acting thread, which sees on its way into a forward
that the trainer has pointed to something in its memory. For in a process that does nothing but forward a small model,
another thread waits for the interpreter, some milliseconds at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol

from wsync import native
from wsync.network.landing import Landing
from wsync.network.pair import GivenUp
from wsync.receiving.events import Event, SlowPath
from wsync.receiving.gate import process_gate
from wsync.receiving.receiver_thread import LineHandler
from wsync.receiving.staged import staged
from wsync.types import Update
from wsync.wire.checksum import seal
from wsync.wire.words import Kind, Line, Message


class WorkersLine(Line, Protocol):
    """A worker's end of a line, which can be looked into."""

    def attach(self, receiver: LineHandler) -> None:
        """Call ``receiver.on_readable()`` when there is something to ``receive``."""
        ...

    def detach(self, receiver: LineHandler) -> None:
        """No more; return when no such call is under way, unless this is one."""
        ...

    def alive(self) -> bool:
        """Whether the other end is there, where nobody would tell that it is not."""
        ...

    def readable(self) -> bool:
        """Whether there is something to ``receive``, now."""
        ...

    def peek(self) -> Message | None:
        """The next message, if all of it is there, and has no payload; it stays there."""
        ...


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

    def __init__(self, receiver: SlowPath, end: End, line: WorkersLine) -> None:
        self._receiver = receiver
        self._end = end
        self._line = line
        self._landing = end.landing
        self._go_through = process_gate().turnstile.go_through
        self._installer: native.Installer | None = None
        self._arrived: list[tuple[Message, int]] = []  # an update, and the buffer that it is in; maybe twice
        self._handled = 0  # the newest version among those that had arrived
        self._unsaid: Message | None = None  # the answer to it, until it was sent
        self._reading = threading.Lock()  # the line
        self._looked = False  # whether the acting thread has read from it as well

    def arm(self, installer: native.Installer | None) -> None:
        """The model takes updates by ``installer``, while nothing is staged; None for the slow path."""
        self._installer = installer

    def on_readable(self) -> bool:
        """Do what the sender has said; False when it is gone."""
        receiver, end = self._receiver, self._end
        with self._reading:
            if self._looked and not self._line.readable():
                return True
            message = self._line.receive()
        if message is None:
            self._installer = None  # what may be left of the line means nothing
        if message is None or message.kind is not Kind.NEWS or self._installer is None:
            return receiver.follow(end.understand(message))
        try:
            index = self._landing.fetch(message.version)
        except RuntimeError:  # the line of tensors has broken, so there will be no more
            return receiver.follow(end.give_up())
        if index >= 0:
            if not self._is_whole(message.payload, index):
                self._landing.took(message.version)
                return receiver.follow(end.understand(message, index))
            receiver.told_at = time.perf_counter()
            self._arrived.append((message, index))
        self._go_through()
        receiver.told_at = 0.0  # the acting thread may have been first
        return True

    def _is_whole(self, payload: bytes, index: int) -> bool:
        """Whether an update is all here, and undamaged, and nothing comes with it."""
        return payload == (seal(self._landing.berths[index].content) if self._landing.checksum else b"")

    def enter(self) -> bool:
        """Install what has arrived."""
        if self._unsaid is not None:
            self._answer(self._unsaid)
        if not self._arrived and self._landing.pointed():
            self._look()
        while self._arrived:
            message, index = self._arrived[0]
            if message.version > self._handled:
                return self._install(message, index)
            del self._arrived[0]  # both threads had it, or a signal has struck
        return self._receiver.enter() if self._end.pending is not None else False

    def _look(self) -> None:
        """Fetch what the trainer has pointed this worker to, if it has announced that by now, and nothing before it.

        The announcement is left where it is until it is dealt with: a signal may strike between any two lines.
        """
        if self._installer is None or staged or self._landing.checksum:
            return
        if self._reading.locked():  # a hint: the other thread may be reading a long message
            return
        with self._reading:
            message = self._announced()
        if message is None:
            return
        try:
            index = self._landing.fetch(message.version)
        except GivenUp:  # the other thread comes upon it, too, and hangs up
            return
        if index >= 0:
            self._arrived.append((message, index))

    def _announced(self) -> Message | None:
        """The update that is announced next; what the other thread has not come to of those before is discarded."""
        message = self._line.peek()
        while message is not None and message.kind is Kind.NEWS and message.version <= self._handled:
            self._looked = True
            self._line.receive()
            message = self._line.peek()
        return message if message is not None and message.kind is Kind.NEWS else None

    def _install(self, message: Message, index: int) -> bool:
        started = time.perf_counter()
        receiver, end, installer = self._receiver, self._end, self._installer
        self._landing.took(message.version)
        if installer is None or staged or receiver.waiting or not installer.install(self._landing.berths[index].views):
            end.understand(message, index)
            self._handled = message.version
            del self._arrived[0]
            return receiver.enter()
        told_at, receiver.told_at = receiver.told_at, 0.0
        receiver.version = message.version
        end.stay(index)
        wait = started - told_at if told_at else 0.0
        answer = Message(Kind.ACK, end.worker, message.version, b"", wait, time.perf_counter() - started)
        # Between these no signal strikes: an update that may have been answered must not be installed once more.
        self._unsaid, self._handled, end.pending = answer, message.version, None
        del self._arrived[0]
        self._answer(answer)
        return False

    def _answer(self, answer: Message) -> None:
        self._end.say(answer)
        self._unsaid = None  # not before: a signal may strike between any two lines

    def leave(self) -> None:
        """Nothing is borrowed."""
