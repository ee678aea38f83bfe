"""Completing a connection in the receiver thread, for a worker that does not wait for the sender."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from wsync.control.receiver_thread import receiver_thread
from wsync.errors import NotConnected, SyncTimeout
from wsync.gate import process_gate


class BackgroundConnect:
    """A connection that the receiver thread completes. Implements ``wsync.control.receiver_thread.MessageHandler``.

    Created and begun by ``init_on_worker``; ``wait`` and ``close`` are called by the worker's own threads.

    Args:
        connect: completes the connection; called once, by the receiver thread.

    Attributes:
        pending: whether ``wait`` has not yet returned True or raised.
    """

    def __init__(self, connect: Callable[[], None]) -> None:
        self.pending = True
        self._connect = connect
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def begin(self, descriptors: Sequence[int]) -> None:
        """Let the receiver thread connect once one of ``descriptors`` is readable: the sender has answered or has gone.

        Raises:
            OSError, RuntimeError: there is no descriptor or thread left. ``close`` has to follow.
        """
        with self._lock:  # the thread may call before all descriptors are registered
            for descriptor in descriptors:
                receiver_thread().register(self, descriptor, [descriptor])

    def on_readable(self) -> bool:
        """See ``MessageHandler``. True if it connected: the receiver then uses one of the descriptors."""
        with self._lock:
            if self._finished.is_set():
                return False
            try:
                self._connect()
                receiver_thread().unregister(self)
            except BaseException as error:  # noqa: BLE001  raised by wait(), in the worker's own thread
                self._error = error
            self._finished.set()
            return self._error is None

    def wait(self, timeout: float | None) -> bool:
        """Return whether the worker is connected, after at most ``timeout`` seconds (None: no limit).

        Raises:
            NotConnected: ``close`` was called first.
            BaseException: whatever ``connect`` raised.
        """
        if not self._finished.wait(timeout):
            return False
        self.pending = False
        if self._error is not None:
            raise self._error
        return True

    def finish(self, timeout: float | None) -> None:
        """``wait``, for a call of ``connect``.

        Raises:
            SyncTimeout: the sender has not accepted the worker within ``timeout`` seconds; the attempt goes on.
            RuntimeError: called inside the gate, which the receiver thread needs to connect.
            BaseException: see ``wait``.
        """
        if process_gate().held_here:
            raise RuntimeError("call connect() outside any forward and any wsync.gate() block")
        if not self.wait(timeout):
            raise SyncTimeout(f"the sender did not answer within {timeout} s: does it call connect() or readmit()?")

    def close(self) -> None:
        """Stop waiting for the sender, and end ``wait`` in other threads. On return no ``connect`` is running."""
        receiver_thread().unregister(self)
        if not self._finished.is_set():
            self._error = NotConnected("this worker was shut down before the sender had accepted it")
            self._finished.set()
