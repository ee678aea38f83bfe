"""Which version a worker's model has, and who waits in ``receive`` for the next one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from wsync.deadlines import deadline_in, remaining
from wsync.errors import NotConnected
from wsync.receiving.end import ReceiverEnd
from wsync.receiving.gate import process_gate

_LOOK = 2.0  # seconds after which somebody who waits looks whether the sender is there, where nobody would tell


class Versions:
    """The versions of one model in one worker.

    Args:
        end: tells the sender whether this worker must be woken, and whether the sender is there.

    Attributes:
        version: that the model has.
        waiting: how many wait in ``receive``, and have to be woken by an update.
    """

    def __init__(self, end: ReceiverEnd) -> None:
        self.version = 0
        self.waiting = 0
        self._end = end
        self._seen = 0
        self._quiet = False
        self._closed = False
        self._free()

    def _free(self) -> None:
        self._guarded = threading.RLock()  # entered by itself: a signal that strikes as a Condition is would keep it
        self._changed = threading.Condition(self._guarded)

    def came(self, version: int) -> None:
        """The model has it."""
        with self._guarded:
            self.version = version
            self._changed.notify_all()

    def ended(self) -> None:
        """There will be no more; who waits in ``receive`` is let go."""
        with self._guarded:
            self._closed = True
            self._changed.notify_all()

    def await_next(self, timeout: float | None, take: Callable[[], Any]) -> Any | None:
        """Wait until a version is installed that is newer than the last one taken; what ``take()`` makes of it.

        Args:
            timeout: seconds, also for a gate that somebody else holds; None for no limit.
            take: called in the gate.

        Raises:
            NotConnected: the sender is gone, and there will be nothing more.
            RuntimeError: called inside the gate, where nothing is installed.
        """
        if process_gate().held_here:
            raise RuntimeError("receive() inside a forward, or wsync.gate(), would wait for itself: leave it first")
        deadline = deadline_in(timeout)
        self._await_more(1)
        try:
            process_gate().call_before(deadline, bool)  # what there is to install is installed on the way
            self._await_change(deadline)
            taken = process_gate().call_before(deadline, self._take, take)
        finally:
            self._await_more(-1)
        with self._guarded:
            if taken is None and self._closed and self.version <= self._seen:
                raise NotConnected("the sender (or this end) has shut down, or died: there will be no more weights")
        return taken

    def _take(self, take: Callable[[], Any]) -> Any | None:
        if self.version <= self._seen:
            return None
        taken, self._seen = take(), self.version
        return taken

    def _await_change(self, deadline: float | None) -> None:
        """Wait for a newer version, the sender's end, or the deadline."""
        while True:
            left = remaining(deadline)
            with self._guarded:
                pause = _LOOK if left is None else min(left, _LOOK)
                if self._changed.wait_for(lambda: self.version > self._seen or self._closed, pause) or left == 0.0:
                    return
            if not self._end.alive():
                with self._guarded:
                    self._closed = True

    def quiet(self) -> None:
        """Do not be woken for updates that nobody waits for: this worker acts through the gate alone."""
        self._quiet = True
        self._await_more(0)

    def _await_more(self, receivers: int) -> None:
        """So many more wait in ``receive``: while anybody does, or this worker is not quiet, it must be woken."""
        with self._guarded:
            self.waiting += receivers
            if not self._closed:
                self._end.call(self.waiting > 0 or not self._quiet)

    def orphan(self) -> None:
        """Nothing more will come: this is a forked child of the worker."""
        self._free()  # a thread that is not here may hold the lock
        self._closed = True
