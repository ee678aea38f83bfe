"""The send-loop thread: sends waiting updates as soon as their worker is ready, while the trainer does other work."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from wsync.control.workers import WorkerConnections
from wsync.deadlines import NOW, wait_readable

_log = logging.getLogger(__name__)
_JOIN_TIMEOUT = 2.0  # seconds; longer only while a thread of the trainer waits for workers, with the lock


class SendLoop:
    """Runs the send-loop thread while an update waits for a worker.

    The thread reads the workers' messages: an answer causes the next update to be sent.

    All methods but ``close`` are called under the lock, by the thread that calls the scheme.

    Args:
        connections: the connections to all workers.
        lock: the lock of the ``SenderSideChannel``; the thread takes it to read messages.
        needed: returns whether an update waits for a connected worker.
    """

    def __init__(self, connections: WorkerConnections, lock: threading.RLock, needed: Callable[[], bool]) -> None:
        self._connections, self._lock, self._needed = connections, lock, needed
        self._thread: threading.Thread | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._closed = False

    def start_or_end(self) -> None:
        """Start the thread if an update waits; wake it if it runs and none does, so that it ends.

        The calling thread may have read the message for which the thread waits.
        """
        needed, running = self._needed(), self.running
        if running and not needed:
            self.connections_changed()
        elif needed and not running and not self._closed:
            self._thread = threading.Thread(target=self._run, name="wsync-send-loop", daemon=True)
            self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the thread runs. It ends by itself, or after an error."""
        return self._thread is not None and self._thread.is_alive()

    def connections_changed(self) -> None:
        """Wake the thread, so that it waits for the present set of connections."""
        if self._thread is not None and not self._closed:
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            self._send_what_waits()
        except Exception:  # noqa: BLE001  of a user's transport; ``start_or_end`` starts the thread again
            _log.exception("the send-loop thread has ended by an error")

    def _send_what_waits(self) -> None:
        while True:
            with self._lock:
                descriptors = [self._wake, *self._connections.awaited_descriptors]
            ready = wait_readable(descriptors, None)
            with self._lock:
                try:
                    if self._wake in ready:
                        os.eventfd_read(self._wake)
                    if not self._closed:
                        self._connections.read(NOW)
                except BaseException:
                    self._thread = None  # under the lock: the next ``start_or_end`` starts the thread again
                    raise
                if self._closed or not self._needed():
                    self._thread = None
                    return

    def stop(self) -> None:
        """Let the thread end when it next has the lock. ``close`` follows."""
        self._closed = True
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Wait for the thread to end. Called without the lock; by the thread itself if it runs a finalizer.

        Idempotent.
        """
        thread = self._thread
        if thread is not None and thread.ident is not None and thread is not threading.current_thread():
            thread.join(_JOIN_TIMEOUT)
            if thread.is_alive():
                return  # it still uses the descriptor
        wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)
