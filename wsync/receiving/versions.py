"""The version that a worker's model has, and the threads that wait in ``receive`` for the next one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from wsync.deadlines import deadline_in, remaining
from wsync.errors import NotConnected, in_forked_child
from wsync.gate import process_gate
from wsync.receiving.protocols import ReceiveChannel

CHECK_INTERVAL = 2.0  # seconds between checks that the sender is alive, in case no message reports its end


class VersionState:
    """The version of one model in one worker, and the threads that wait for the next one. The base of ``Receiver``.

    Args:
        channel: the connection to the sender.

    Attributes:
        version: the version that is installed in the model.
        waiting: how many threads wait in ``receive``; installing an update has to wake them.
        refused: the newest version that could not be installed, or did not arrive.
    """

    def __init__(self, channel: ReceiveChannel) -> None:
        self.version = 0
        self.waiting = 0
        self.refused = 0
        self._channel = channel
        self._seen = 0
        self._wake_only_for_receive = False
        self._closed = False
        self._finished = False  # once closed: True after a shutdown of either end, False after a death
        self._end_returned = False  # whether ``wait_next`` has returned None for the end
        self._creator = os.getpid()
        self._reset_lock()

    def require_creator(self) -> None:
        """Check that this process has made this object.

        Raises:
            NotConnected: it is a forked child of the one that has.
        """
        if os.getpid() != self._creator:
            raise in_forked_child()

    def _reset_lock(self) -> None:
        self._guard = threading.RLock()  # entered directly: a Condition may stay locked if a signal handler raises
        self._changed = threading.Condition(self._guard)

    def set_version(self, version: int) -> None:
        """Record that the model has ``version``, and wake the threads that wait for it."""
        with self._guard:
            self.version = version
            self._changed.notify_all()

    def reopen(self) -> None:
        """Record that there may be more versions: a connection is about to be made."""
        with self._guard:
            self._closed = self._finished = self._end_returned = False
            self.refused = 0

    def end(self, *, finished: bool) -> None:
        """Record that there will be no more versions, and wake the threads that wait for one.

        Args:
            finished: whether an end has shut down; the first call decides.
        """
        with self._guard:
            self._finished = finished if not self._closed else self._finished
            self._closed = True
            self._changed.notify_all()

    @property
    def tried(self) -> int:
        """The newest version that was installed, or could not be."""
        return max(self.version, self.refused)

    @property
    def closed(self) -> bool:
        """Whether there will be no more versions."""
        return self._closed

    @property
    def finished(self) -> bool:
        """Whether there will be no more versions because an end has shut down; False after a death."""
        return self._closed and self._finished

    def wait_next(self, timeout: float | None, take: Callable[[], Any]) -> Any | None:
        """Wait until a version is installed that is newer than the last one taken; return what ``take()`` returns.

        Args:
            timeout: seconds, including those for a gate that another thread holds; None for no limit.
            take: called inside the gate.

        Returns:
            What ``take()`` returns; None at the timeout, and when an end has shut down.

        Raises:
            NotConnected: the sender died, or has disconnected this worker; or a call before this one has returned None
                because an end had shut down; or this is a forked child.
            RuntimeError: called inside the gate, where nothing is installed.
        """
        self.require_creator()
        if process_gate().held_here:
            raise RuntimeError("call receive() outside any forward and any wsync.gate() block")
        deadline, end_returned = deadline_in(timeout), self._end_returned
        self._add_waiting(1)
        try:
            process_gate().call_with_deadline(deadline, bool)  # a published version is installed on the way
            while True:
                self._wait_for_change(deadline)
                taken = process_gate().call_with_deadline(deadline, self._take, take)
                if taken is not None or self._closed or remaining(deadline) == 0.0:
                    break  # else another thread has taken that version
        finally:
            self._add_waiting(-1)
        with self._guard:
            if taken is None and self._closed and self.version <= self._seen:
                if end_returned or not self._finished:
                    raise no_more_weights(self._finished)
                self._end_returned = True
        return taken

    def _take(self, take: Callable[[], Any]) -> Any | None:
        if self.version <= self._seen:
            return None
        taken, self._seen = take(), self.version
        return taken

    def _wait_for_change(self, deadline: float | None) -> None:
        """Wait until there is a newer version, the sender is gone, or the deadline has passed."""
        while True:
            left = remaining(deadline)
            with self._guard:
                pause = CHECK_INTERVAL if left is None else min(left, CHECK_INTERVAL)
                if self._changed.wait_for(lambda: self.version > self._seen or self._closed, pause) or left == 0.0:
                    return
            self.check_sender()

    def check_sender(self) -> None:
        """End if the sender has died and no message has reported it. Called every few seconds by waiting threads."""
        if not self._channel.sender_is_alive():
            self.end(finished=False)

    def wake_only_for_receive(self) -> None:
        """Have the sender wake this worker only while a thread waits in ``receive``.

        Otherwise the next forward installs the update. Called once after ``connect``, by the same thread.
        """
        self._wake_only_for_receive = True
        self._add_waiting(0)

    def _add_waiting(self, threads: int) -> None:
        with self._guard:
            self.waiting += threads
            arena = self._channel.arena
            if arena is not None and not self._closed:
                arena.set_wakeups(self.waiting > 0 or not self._wake_only_for_receive)

    def end_in_forked_child(self) -> None:
        """End in a forked child. Its lock may be held by a thread that does not exist there."""
        self._reset_lock()
        self._closed = True


def no_more_weights(finished: bool) -> NotConnected:
    """Return the error of a call that waits for weights after the end; ``finished`` as in ``VersionState``."""
    if finished:
        return NotConnected("the sender (or this end) has shut down: there will be no more weights")
    return NotConnected(
        "the sender died, ended without shutdown(), or has disconnected this worker: there will be no more weights"
    )
