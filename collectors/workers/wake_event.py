"""A descriptor that ends a wait for descriptors."""

from __future__ import annotations

import os
import threading
from contextlib import suppress


class WakeEvent:
    """A descriptor that any thread makes readable. It is closed with this object; afterwards ``set`` does nothing."""

    _descriptor: int | None = None

    def __init__(self) -> None:
        self._lock = threading.RLock()  # re-entrant: a signal handler may call ``set`` within any of these methods
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """Return the descriptor."""
        if self._descriptor is None:
            raise ValueError("this event is closed")
        return self._descriptor

    def set(self) -> None:
        """Make the descriptor readable. May be called from a signal handler."""
        with self._lock:
            if self._descriptor is not None:
                os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Make the descriptor not readable."""
        with self._lock, suppress(BlockingIOError):
            if self._descriptor is not None:
                os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)

    def __del__(self) -> None:
        """Close the descriptor of a collector that was not shut down, or could not be made."""
        if self._descriptor is not None:
            self.close()
