"""Somebody on the line between a sender and its workers: holds back, drops or repeats what a worker says.

Installed at the sender's door, in front of the real line of whatever backend: words come by the real one, and are
handed on when the test lets them.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import wsync
from wsync.wire.words import Door, Kind, Line, Message

Judge = Callable[[Message], int]
"""How many times a message is handed on; below 0: it is held back until ``Relay.release``."""

HOLD = -1


class RelayedLine:
    """The sender's end of a line (a ``Line``), with a relay in front of the real one."""

    def __init__(self, line: Line, relay: Relay) -> None:
        self._line = line
        self._relay = relay
        self._lock = threading.Lock()
        self._words: deque[Message | None] = deque()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._listen, name="relay")
        self._thread.start()
        self.peer = line.peer

    def _listen(self) -> None:
        poller = select.poll()
        poller.register(self._line.fileno(), select.POLLIN)
        poller.register(self._stop, select.POLLIN)
        while self._stop not in [fd for fd, _ in poller.poll()]:
            message = self._line.receive()
            self._relay.came(self, message)
            if message is None:
                return

    def hand_on(self, message: Message | None) -> None:
        """Let the sender have a message."""
        with self._lock:
            if self._bell >= 0:
                self._words.append(message)
                os.eventfd_write(self._bell, 1)

    @property
    def signs(self) -> Sequence[int]:
        return (self._bell, *self._line.signs[1:])

    def fileno(self) -> int:
        return self._bell

    def send(self, message: Message) -> None:
        self._line.send(message)

    def call(self, message: Message) -> None:
        self._line.call(message)

    def receive(self) -> Message | None:
        os.eventfd_read(self._bell)
        return self._words.popleft()

    def close(self) -> None:
        if self._bell < 0:
            return
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        with self._lock:
            os.close(self._bell)
            self._bell = -1
        os.close(self._stop)
        self._line.close()


class Relay:
    """A door (a ``Door``) whose visitors are heard through relays.

    Args:
        door: the real one.
    """

    def __init__(self, door: Door) -> None:
        self._door = door
        self._lock = threading.Lock()
        self._held: list[tuple[RelayedLine, Message]] = []
        self._judge: Judge = lambda message: 1

    def judge(self, judge: Judge) -> None:
        """From now on, so."""
        with self._lock:
            self._judge = judge

    def release(self) -> int:
        """Hand on what was held back; how many words that were."""
        with self._lock:
            held, self._held = self._held, []
        for line, message in held:
            line.hand_on(message)
        return len(held)

    def came(self, line: RelayedLine, message: Message | None) -> None:
        with self._lock:
            times = 1 if message is None else self._judge(message)
            if message is not None and times == HOLD:
                self._held.append((line, message))
        for _ in range(times):
            line.hand_on(message)

    def fileno(self) -> int:
        return self._door.fileno()

    def accept(self) -> tuple[Line, Message] | None:
        visitor = self._door.accept()
        return None if visitor is None else (RelayedLine(visitor[0], self), visitor[1])

    def close(self) -> None:
        self._door.close()


def intercept(scheme: wsync.WeightSyncScheme) -> Relay:
    """Stand on the lines of a scheme that was just initialised on the sender."""
    lines: Any = scheme.sender._end._lines  # pyright: ignore[reportAttributeAccessIssue]
    relay = lines._door = Relay(lines._door)
    return relay


def answers_of(worker: int, times: int) -> Judge:
    """A judge of a worker's answers to updates alone."""
    return lambda message: times if message.kind is Kind.ACK and message.worker == worker else 1
