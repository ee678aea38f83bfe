"""Noticing a new version: by ``watchfiles`` in a local folder, and in any store by looking again and again."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

_SHORTEST, _LONGEST = 0.02, 1.0  # seconds between two looks
_STEP = 5  # milliseconds until watchfiles reports a change


class Watch:
    """Tells one thread when to look for another version. Made before its first look.

    Args:
        folder: the store's folder, if it is on a local file system.
        stop: ends every wait.
    """

    def __init__(self, folder: Path | None, stop: threading.Event) -> None:
        self._stop = stop
        self._pause = _SHORTEST
        self._notify = None
        if folder is not None and folder.is_dir():
            with suppress(ModuleNotFoundError):  # of the extra ``store``: the folder is looked at as any other
                from watchfiles._rust_notify import RustNotify  # documented; ``watchfiles.watch`` would begin later

                self._notify = RustNotify([str(folder)], False, False, 0, False, False)

    def wait(self, *, found: bool) -> None:
        """Wait until there may be another version, for a second at most. Pauses grow while nothing is ``found``."""
        if self._notify is not None:
            self._notify.watch(_STEP, _STEP, int(1000 * _LONGEST), self._stop)
            return
        self._pause = _SHORTEST if found else min(2 * self._pause, _LONGEST)
        self._stop.wait(self._pause)

    def close(self) -> None:
        """Stop watching."""
        if self._notify is not None:
            self._notify.close()
