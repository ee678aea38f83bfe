"""Signals to a child process that cannot reach another process."""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing.connection import wait


class ProcessHandle:
    """A pidfd of a child process. Any thread may send signals while another thread closes the handle.

    A pid does not suffice: once the child has been reaped, the number can belong to another process.

    Args:
        pid: the process id of a child that this process has just started; None: the handle is empty.
    """

    def __init__(self, pid: int | None) -> None:
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        if pid is not None:
            try:
                self._descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                return  # the process has ended already

    @property
    def empty(self) -> bool:
        """Whether the handle refers to no process, or is closed."""
        return self._descriptor is None

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; return whether the process was still running."""
        with self._lock:
            if self._descriptor is None or wait([self._descriptor], 0):
                return False
            try:
                signal.pidfd_send_signal(self._descriptor, number)
            except ProcessLookupError:
                return False
            return True

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
