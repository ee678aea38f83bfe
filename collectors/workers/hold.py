"""A hold on a process: a signal that is sent by it reaches that process, or nobody."""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing.connection import wait


class Hold:
    """A pidfd of a child that has just been started; any thread may signal by it, while another one lets go.

    A bare pid would not do: it is another process's as soon as the child has been reaped, by whomever.

    Args:
        pid: of the child; None: the hold is empty, and reaches nobody.
    """

    def __init__(self, pid: int | None) -> None:
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        if pid is not None:
            try:
                self._descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                return  # it has ended already

    @property
    def empty(self) -> bool:
        """Whether there is nothing to signal (any more)."""
        return self._descriptor is None

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; whether there was a process to send it to."""
        with self._lock:
            if self._descriptor is None or wait([self._descriptor], 0):
                return False
            try:
                signal.pidfd_send_signal(self._descriptor, number)
            except ProcessLookupError:
                return False
            return True

    def close(self) -> None:
        """Let go; harmless when repeated."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
