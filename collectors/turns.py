"""One thread gathers, and others bring weights: they take turns, and whoever waits for workers is interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Turns:
    """A lock for two kinds of work. Visits go first: else who gathers would have it again and again.

    Args:
        call: has whoever gathers come to an end soon; does no harm where nobody does.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._guests: set[object] = set()
        self._nobody = threading.Event()
        self._nobody.set()

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """The long kind; it may be waited in."""
        if self._guests:
            self._nobody.wait()
        with self._lock:
            yield

    @contextmanager
    def visiting(self) -> Iterator[None]:
        """The short kind."""
        guest = object()
        try:
            self._guests.add(guest)
            self._nobody.clear()
            if self._lock.locked():
                self._call()
            with self._lock:
                yield
        finally:
            self._guests.discard(guest)
            if not self._guests:
                self._nobody.set()
