"""The lock between the thread that gathers batches and threads that deliver weights."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class GatherLock:
    """A re-entrant lock with two modes: gathering, which may wait for workers for long, and updating, which is short.

    A thread that wants to update makes ``wakeup_fd`` readable, so that the gathering thread stops waiting and releases
    the lock. Updates have priority, because a gathering thread would otherwise take the lock again at once.

    Attributes:
        wakeup_fd: a descriptor that is readable while the gathering thread has to stop waiting; -1 after ``close``.
    """

    wakeup_fd: int = -1

    def __init__(self) -> None:
        self.wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._updates: set[object] = set()  # those that hold the lock or wait for it
        self._no_updates = threading.Event()
        self._no_updates.set()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self.wakeup_fd < 0

    def wake(self) -> None:
        """Make ``wakeup_fd`` readable. May be called from a signal handler."""
        if not self.closed:
            os.eventfd_write(self.wakeup_fd, 1)

    def clear_wakeup(self) -> None:
        """Make ``wakeup_fd`` not readable."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.wakeup_fd)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        descriptor, self.wakeup_fd = self.wakeup_fd, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        """Close the descriptor of a collector that was not shut down."""
        self.close()

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Hold the lock to gather; the block may wait for workers and for ``wakeup_fd``."""
        if self._owner != threading.get_ident() and self._updates:
            self._no_updates.wait()  # once only: continuous updates must not starve the gathering thread
        with self._hold() as nested:
            # An update registers itself and then looks for an owner; this thread becomes the owner and then looks for
            # updates. In any order, one of the two sees the other and wakes this thread.
            if self._updates and not nested:
                self.wake()
            yield

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Hold the lock to deliver an update, ahead of a thread that gathers."""
        update = object()
        try:
            self._updates.add(update)
            self._no_updates.clear()
            if self._owner not in (None, threading.get_ident()):
                self.wake()
            with self._hold():
                yield
        finally:
            self._updates.discard(update)
            if not self._updates:
                self._no_updates.set()

    @contextmanager
    def ending(self, timeout: float) -> Iterator[None]:
        """Hold the lock to end the workers, or go on without it after ``timeout`` seconds: its owner may be stuck."""
        self.wake()
        held = self._lock.acquire(timeout=timeout)
        try:
            yield
        finally:
            if held:
                self._lock.release()

    @contextmanager
    def _hold(self) -> Iterator[bool]:
        """Hold the lock; yield whether this thread held it already."""
        with self._lock:
            owner, self._owner = self._owner, threading.get_ident()
            try:
                yield owner is not None
            finally:
                self._owner = owner
