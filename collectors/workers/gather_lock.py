"""The lock between the thread that gathers batches and threads that deliver weights."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from collectors.workers.wake_event import WakeEvent


class GatherLock:
    """A re-entrant lock with two modes: gathering, which is given up when an update requests it, and updating.

    Threads take the lock in the order of their requests: a thread that releases the lock and requests it again at once
    stands behind those that wait, so neither continuous updates nor continuous gathering starves the other. A
    thread that wants to update sets ``wakeup``, so that a gathering thread stops waiting and releases the lock.

    Attributes:
        wakeup: set while the gathering thread has to stop waiting.
    """

    def __init__(self) -> None:
        self.wakeup = WakeEvent()
        self._changed = threading.Condition()
        self._owner: int | None = None
        self._waiting: deque[_Waiting] = deque()

    def gathering(self) -> AbstractContextManager[None]:
        """Hold the lock to gather; the block may wait for workers and for ``wakeup``."""
        return self._held(updates=False)

    def updating(self) -> AbstractContextManager[None]:
        """Hold the lock to deliver an update; a thread that gathers is woken, and releases the lock."""
        return self._held(updates=True)

    def ending(self, timeout: float) -> AbstractContextManager[None]:
        """Hold the lock to end the workers, or go on without it after ``timeout`` seconds: its owner may be stuck."""
        self.wakeup.set()
        return self._held(updates=True, timeout=timeout)

    @contextmanager
    def _held(self, *, updates: bool, timeout: float | None = None) -> Iterator[None]:
        taken = self._acquire(updates=updates, timeout=timeout)
        try:
            yield
        finally:
            if taken:
                with self._changed:
                    self._owner = None
                    self._changed.notify_all()

    def _acquire(self, *, updates: bool, timeout: float | None) -> bool:
        """Take the lock after those that asked earlier; return False if this thread held it already or time ran out."""
        thread = threading.get_ident()
        if self._owner == thread:
            return False
        turn = _Waiting(updates)
        with self._changed:
            self._waiting.append(turn)
            try:
                if updates and self._owner is not None:
                    self.wakeup.set()
                if not self._changed.wait_for(lambda: self._owner is None and self._waiting[0] is turn, timeout):
                    return False
                self._owner = thread
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()
            if not updates and any(waiting.updates for waiting in self._waiting):
                self.wakeup.set()  # those saw another owner when they asked
            return True


class _Waiting:
    """A thread that waits for the lock, compared by identity."""

    def __init__(self, updates: bool) -> None:
        self.updates = updates
