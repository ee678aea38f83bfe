"""Who brings what waits for a worker as soon as it is ready, while the trainer does something else."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from wsync.deadlines import NOW, wait_readable
from wsync.wire.lines import Lines


class Courier:
    """A thread that listens to workers while something waits for one of them: hearing an answer moves its lane on.

    All but ``close`` is called with the lock held.

    Args:
        lines: to all workers.
        lock: of whoever owns them.
        waits: whether anything waits for a worker that is there.
    """

    def __init__(self, lines: Lines, lock: threading.RLock, waits: Callable[[], bool]) -> None:
        self._lines, self._lock, self._waits = lines, lock, waits
        self._thread: threading.Thread | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._closed = False

    @property
    def under_way(self) -> bool:
        """Whether it is listening."""
        return self._thread is not None and self._thread.ident is not None  # a signal may strike before it is started

    def go(self) -> None:
        """Begin, if there is need."""
        if not self.under_way and self._waits():
            self._thread = threading.Thread(target=self._carry, name="wsync-courier", daemon=True)
            self._thread.start()

    def look_again(self) -> None:
        """There is somebody new: it listens to those who were there before."""
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)

    def _carry(self) -> None:
        while True:
            with self._lock:
                signs = [self._wake, *self._lines.signs]
            ready = wait_readable(signs, None)
            with self._lock:
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                if not self._closed:
                    self._lines.read(NOW)
                if self._closed or not self._waits():
                    self._thread = None
                    return

    def dismiss(self) -> None:
        """Have it end, as soon as it has the lock; ``close`` comes after that."""
        self._closed = True
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Wait for its end."""
        thread = self._thread
        if thread is not None and thread.ident is not None:
            thread.join()
        os.close(self._wake)
