"""Holds back, drops or repeats what workers send to a sender.

``intercept`` has the scheme accept its workers' connections through a relay, by way of ``create_rendezvous``.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import wsync
from wsync.control import Connection, Kind, Message

Rule = Callable[[Message], int]
"""How many times a message is delivered; below 0: it is held back until ``Relay.release``."""

HOLD = -1


class RelayedConnection:
    """The sender's end of a ``Connection``: messages arrive when the relay delivers them."""

    busy = True  # the fast path would read the socket itself

    def __init__(self, connection: Connection, relay: Relay) -> None:
        self._connection = connection
        self._relay = relay
        self._lock = threading.Lock()
        self._messages: deque[Message | None] = deque()
        self._available = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._read, name="relay")
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def _read(self) -> None:
        poller = select.poll()
        poller.register(self._connection.fileno(), select.POLLIN)
        poller.register(self._stop, select.POLLIN)
        while self._stop not in [fd for fd, _ in poller.poll()]:
            message = self._connection.receive()
            self._relay.received(self, message)
            if message is None:
                return

    def deliver(self, message: Message | None) -> None:
        """Have ``receive`` return a message."""
        with self._lock:
            if self._available >= 0:
                self._messages.append(message)
                os.eventfd_write(self._available, 1)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """See ``Connection``."""
        return (self._available, *self._connection.descriptors[1:])

    def fileno(self) -> int:
        """See ``Connection``."""
        return self._available

    def receive(self) -> Message | None:
        """See ``Connection``."""
        os.eventfd_read(self._available)
        return self._messages.popleft()

    def close(self) -> None:
        """See ``Connection``."""
        if self._available < 0:
            return
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        with self._lock:
            os.close(self._available)
            self._available = -1
        os.close(self._stop)
        self._connection.close()


class Relay:
    """Where workers connect, in front of the real ``Listener``. Applies ``rule`` to each message."""

    def __init__(self, listener: Any) -> None:
        self._listener = listener
        self._held: list[tuple[RelayedConnection, Message]] = []
        self._lock = threading.Lock()
        self.rule: Rule = lambda message: 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)

    def accept(self) -> tuple[Any, Message] | None:
        """See ``Listener``."""
        accepted = self._listener.accept()
        return None if accepted is None else (RelayedConnection(accepted[0], self), accepted[1])

    def received(self, connection: RelayedConnection, message: Message | None) -> None:
        """Called by the connection's thread for each message, and with None at its end."""
        with self._lock:
            times = 1 if message is None else self.rule(message)
            if message is not None and times == HOLD:
                self._held.append((connection, message))
        for _ in range(times):
            connection.deliver(message)

    def release(self) -> int:
        """Deliver what was held back; returns the number of messages."""
        with self._lock:
            held, self._held = self._held, []
        for connection, message in held:
            connection.deliver(message)
        return len(held)


@contextmanager
def intercept(scheme: wsync.WeightSyncScheme) -> Iterator[list[Relay]]:
    """Around ``init_on_sender``: puts a relay in front of the scheme's listener, and into the list."""
    rendezvous, relays = scheme.create_rendezvous(), list[Relay]()
    real = rendezvous.open

    def open_relay() -> tuple[Any, Any]:
        listener, address = real()
        relays.append(Relay(listener))
        return relays[0], address

    rendezvous.open = open_relay
    scheme.create_rendezvous = lambda: rendezvous
    yield relays
    del scheme.create_rendezvous, rendezvous.open


def acknowledgements_of(worker: int, times: int) -> Rule:
    """A rule for a worker's acknowledgements of updates alone."""
    return lambda message: times if message.kind is Kind.ACK and message.worker == worker else 1
