"""Noticing a new version: by inotify in a local folder, and in any store by reading the manifest, with back-off."""

from __future__ import annotations

import ctypes
import logging
import os
import threading

from wsync.deadlines import deadline_in, remaining, wait_readable
from wsync.errors import WeightSyncError
from wsync.store.versions import VersionStore

_log = logging.getLogger(__name__)
_SHORTEST, _LONGEST = 0.02, 1.0  # seconds between two readings of the manifest
_LONGEST_RETRY = 60.0  # seconds between two readings of a version that cannot be read
_IN_MOVED_TO, _IN_CLOEXEC, _IN_NONBLOCK = 0x80, os.O_CLOEXEC, os.O_NONBLOCK


class Watch:
    """A thread that looks for new versions, from ``start`` to ``close``. The folder exists already.

    Args:
        store: where.
        seen: the name of the version that has been read already; empty for none.

    Attributes:
        ready: an eventfd, readable when there is another version, or the newest should be read again.
    """

    def __init__(self, store: VersionStore, seen: str) -> None:
        self._store = store
        self._seen = seen
        self._retry_at: float | None = None
        self._retry_pause = _SHORTEST
        self._pid = os.getpid()
        self._trouble = ""  # the last error, which has been logged
        self._thread = threading.Thread(target=self._run, name="wsync-store-watch", daemon=True)
        self._stop = self._notify = -1
        self.ready = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._stop = os.eventfd(0, os.EFD_CLOEXEC)
            self._notify = _inotify(store)
        except BaseException:  # the limit of descriptors, or Ctrl-C
            self._close_descriptors()
            raise

    def start(self) -> None:
        """Start the thread. Called once. Raises RuntimeError at the limit of threads; then, as always, ``close``."""
        self._thread.start()

    def read_again(self) -> None:
        """Have ``ready`` announce the newest version once more, after a pause: it could not be read."""
        self._retry_at = deadline_in(self._retry_pause)
        self._retry_pause = min(2 * self._retry_pause, _LONGEST_RETRY)

    def _run(self) -> None:
        descriptors = [descriptor for descriptor in (self._stop, self._notify) if descriptor >= 0]
        pause = _SHORTEST
        while True:
            if self._look():
                pause = _SHORTEST
            happened = wait_readable(descriptors, deadline_in(pause))
            if self._stop in happened:
                self._close_descriptors()
                return
            if self._notify in happened:
                os.read(self._notify, 1 << 16)
            pause = min(2 * pause, _LONGEST)

    def _look(self) -> bool:
        """Return whether there is another version."""
        try:
            newest = self._store.newest()
        except WeightSyncError as error:  # it may be back at the next look
            if str(error) != self._trouble:
                _log.warning("%s", error)
            self._trouble = str(error)
            return False
        self._trouble = ""
        changed = newest is not None and newest.name != self._seen
        if newest is not None and changed:
            self._seen, self._retry_pause = newest.name, _SHORTEST
        if changed or (self._retry_at is not None and remaining(self._retry_at) == 0.0):
            self._retry_at = None
            os.eventfd_write(self.ready, 1)
        return changed

    def close(self) -> None:
        """End the thread, which may be reading: wait at most two seconds for it. Called once.

        In a forked child, which has no such thread, or if it could not be started, only close the descriptors.
        """
        if os.getpid() != self._pid:  # an eventfd is shared by parent and child
            self._close_descriptors()
            return
        os.eventfd_write(self._stop, 1)
        try:
            self._thread.join(2.0)
        except RuntimeError:  # it was not started
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        """Called by the thread at its end: it uses them while it reads."""
        for descriptor in (self.ready, self._stop, self._notify):
            if descriptor >= 0:
                os.close(descriptor)


def _inotify(store: VersionStore) -> int:
    """Return an inotify descriptor for files that are renamed into the store's folder; -1 where there is none."""
    if store.folder is None:
        return -1
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(_IN_CLOEXEC | _IN_NONBLOCK)
    if descriptor < 0:
        return -1
    if libc.inotify_add_watch(descriptor, os.fsencode(store.folder), _IN_MOVED_TO) < 0:
        os.close(descriptor)
        return -1
    return descriptor
