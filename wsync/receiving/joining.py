"""A worker that has knocked and waits for nobody: the process's thread does the rest when the sender answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from wsync.receiving.receiver_thread import receiver_thread


class Joining:
    """The rest of a rendezvous that has begun (a ``LineHandler``).

    Args:
        descriptors: one of them is readable when the sender has answered, or has gone.
        connect: does the rest.
    """

    def __init__(self, descriptors: Sequence[int], connect: Callable[[], None]) -> None:
        self._connect = connect
        self._over = threading.Event()
        self._error: Exception | None = None
        self._lock = threading.Lock()
        with self._lock:  # the thread may be told by the first of them before all are there
            for descriptor in descriptors:
                receiver_thread().register(descriptor, self)

    def on_readable(self) -> bool:
        """Connect. True if that went well: the receiver listens at one of the descriptors from then on."""
        with self._lock:
            if self._over.is_set():
                return False
            try:
                self._connect()
                receiver_thread().unregister(self)
            except Exception as error:  # noqa: BLE001  raised where somebody waits: in the worker's own thread
                self._error = error
            self._over.set()
            return self._error is None

    def wait(self, timeout: float | None) -> bool:
        """Whether this worker is let in, ``timeout`` seconds (None: no limit) from now at the latest.

        Raises:
            WeightSyncError: it cannot be: see ``WeightSyncScheme.connect``.
        """
        if not self._over.wait(timeout):
            return False
        if self._error is not None:
            raise self._error
        return True

    def close(self) -> None:
        """Wait for no answer any more; return when none is being read."""
        receiver_thread().unregister(self)
