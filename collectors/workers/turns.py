"""One thread gathers, and others bring weights: they take turns, and whoever waits for workers is interrupted."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Turns:
    """A lock for two kinds of work. Visits go first: else who gathers would have it again and again.

    Whoever has it may take it again: what is called at the end of an update may bring another one.

    Attributes:
        wake: a descriptor that is readable when whoever gathers shall not wait; -1 after ``close``.
    """

    wake: int = -1

    def __init__(self) -> None:
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._guests: set[object] = set()
        self._nobody = threading.Event()
        self._nobody.set()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self.wake < 0

    def call(self) -> None:
        """Have whoever gathers not wait; harmless in a signal handler, and where nobody does."""
        if not self.closed:
            os.eventfd_write(self.wake, 1)

    def come(self) -> None:
        """The call was heard, if there was one."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.wake)

    def close(self) -> None:
        """Let the descriptor go; harmless when repeated."""
        wake, self.wake = self.wake, -1
        if wake >= 0:
            os.close(wake)

    def __del__(self) -> None:
        """Nobody has closed it: the collector was not shut down."""
        self.close()

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """The long kind; it may be waited in."""
        if self._owner != threading.get_ident() and self._guests:
            self._nobody.wait()  # once: who brings weights all the time must not keep this one out
        with self._holding() as nested:
            # Who comes adds itself and then looks for an owner; an owner looks for guests. One of them sees the other.
            if self._guests and not nested:
                self.call()
            yield

    @contextmanager
    def visiting(self) -> Iterator[None]:
        """The short kind."""
        guest = object()
        try:
            self._guests.add(guest)
            self._nobody.clear()
            if self._owner not in (None, threading.get_ident()):
                self.call()
            with self._holding():
                yield
        finally:
            self._guests.discard(guest)
            if not self._guests:
                self._nobody.set()

    @contextmanager
    def _holding(self) -> Iterator[bool]:
        """With the lock; whether this thread had it already."""
        with self._lock:
            owner, self._owner = self._owner, threading.get_ident()
            try:
                yield owner is not None
            finally:
                self._owner = owner
