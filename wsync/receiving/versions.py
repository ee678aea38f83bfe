"""The version of a worker's model, how far its connection is, and the threads that wait in ``receive``."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from wsync.deadlines import deadline_in, remaining
from wsync.errors import NotConnected, forked_child_error
from wsync.gate import process_gate, without_forward
from wsync.loops.worker_slot import SlotUpdater
from wsync.receiving.protocols import ReadsStore, ReceiveChannel


class Phase(Enum):
    """How far the connection of a worker is: ``CONNECTING``, ``OPEN``, then ``FINISHED`` or ``LOST``, for each one."""

    NEW = auto()  # before the first ``connect`` or ``begin_connect``
    CONNECTING = auto()
    OPEN = auto()
    FINISHED = auto()  # the sender or this worker has shut down
    LOST = auto()  # the sender died or has disconnected this worker, ``connect`` failed, or this is a forked child


class VersionState:
    """The versions of one model in one worker. Threads wait here for the next one.

    Which thread calls a method, and where:

    - ``begin``, ``set_open`` and ``wake_only_for_receive``: the thread that connects, outside the gate.
    - ``record`` and ``notify``: the thread that has installed, inside the gate.
    - ``close``: the receiver thread, or the thread that shuts down, outside the gate.
    - ``wait_next`` and ``wait_first``: the worker's own threads, outside the gate.
    - ``close_in_forked_child``: the fork hook in ``receiving/gated_models.py``, before the child's own code runs.
    - the rest: any thread.

    Args:
        updater: has the version that is installed, and the calls that wait. These are attributes of the updater because
            a ``WorkerSlot`` uses them in each update.
        channel: the connection to the sender.
        subject: what ``wait_next`` reads: see ``Gate.call_for``.

    Attributes:
        phase: the phase of the connection.
        failed_version: the newest version that could not be installed, or did not arrive; with a store 0 once another
            is installed.
        failure: why, with the traceback where there is one.
        last_returned: the version that ``wait_next`` or ``pull`` has returned last.
        on_change: called after each change: a version was installed or has failed, or the connection has ended.
    """

    def __init__(self, updater: SlotUpdater, channel: ReceiveChannel, subject: object) -> None:
        self._updater = updater
        self._subject = subject
        self._channel = channel
        self.phase = Phase.NEW
        self.failed_version = 0
        self.failure = ""
        self.last_returned = 0
        self.on_change: Callable[[], None] = lambda: None
        self._wakeups_only_for_receive = False
        self._in_order = isinstance(channel, ReadsStore)  # versions are installed in the order in which they are read
        self._end_returned = False  # whether ``wait_next`` has returned None because the phase is FINISHED
        self._creator = os.getpid()
        self._reset_lock()

    def _reset_lock(self) -> None:
        # `with self._guard`, not `with self._changed`: Condition.__enter__ is a Python function, in which a signal
        # handler may raise after the lock was acquired.
        self._guard = threading.RLock()
        self._changed = threading.Condition(self._guard)

    # --- the model's version ---

    @property
    def version(self) -> int:
        """The version that is installed in the model."""
        return self._updater.version

    @property
    def in_forward(self) -> bool:
        """See ``SlotUpdater``."""
        return self._updater.in_forward

    @property
    def newest_settled_version(self) -> int:
        """The newest version that was installed, could not be, or did not arrive; 0 if there is none."""
        return max(self.version, self.failed_version)

    @property
    def newest_has_failed(self) -> bool:
        """Whether ``failed_version`` is newer than what is installed."""
        return self.failed_version > (0 if self._in_order else self.version)

    def record(self, version: int, failure: str = "") -> None:
        """Record that the model has ``version``; or why it could not be installed, or did not arrive.

        ``notify`` follows.
        """
        if not failure:
            self._updater.version = version
            if self._in_order:
                self.failed_version = 0  # it was read earlier; a trainer that begins again uses lower numbers
        elif self._in_order or version >= self.failed_version:
            self.failed_version, self.failure = version, failure

    def notify(self) -> None:
        """Wake the threads that wait for a change. Called after the answer to the sender, which they would delay."""
        with self._guard:
            self._changed.notify_all()
        self.on_change()

    # --- the connection ---

    @property
    def in_forked_child(self) -> bool:
        """Whether this process is a forked child of the one that has made this object."""
        return os.getpid() != self._creator

    def require_not_forked(self) -> None:
        """Check that this process is no forked child of the one that has made this object.

        Raises:
            NotConnected: it is.
        """
        if self.in_forked_child:
            raise forked_child_error()

    @property
    def closed(self) -> bool:
        """Whether there will be no more versions."""
        return self.phase in (Phase.FINISHED, Phase.LOST)

    def begin(self) -> None:
        """Record that a connection is being made. Its sender may be another one: versions are counted from 0 again."""
        with self._guard:
            self.phase = Phase.CONNECTING
            self._end_returned = False
            self._updater.version = self.last_returned = self.failed_version = 0

    def set_open(self) -> None:
        """Record that the worker is connected, unless the connection has ended meanwhile."""
        with self._guard:
            if self.phase is Phase.CONNECTING:
                self.phase = Phase.OPEN

    def close(self, *, finished: bool) -> None:
        """Record that there will be no more versions.

        Args:
            finished: whether that is because the sender or this worker has shut down. The first call decides.
        """
        with self._guard:
            if not self.closed:
                self.phase = Phase.FINISHED if finished else Phase.LOST
        self.notify()

    def close_in_forked_child(self) -> None:
        """Close in a forked child. The lock may be held by a thread that does not exist there."""
        self._reset_lock()
        self.phase = Phase.LOST

    # --- waiting ---

    def wait_next(self, timeout: float | None, take: Callable[[], Any]) -> Any | None:
        """Wait until a version is installed that is newer than the last one taken; return what ``take()`` returns.

        Args:
            timeout: seconds, including those for a gate that another thread holds; None for no limit.
            take: called inside the gate.

        Returns:
            What ``take()`` returns; None at the timeout, and when the sender or this worker has shut down.

        Raises:
            NotConnected: ``connect`` was not called, or has failed; or the sender died or has disconnected this worker;
                or an earlier call has returned None because of a shutdown; or this is a forked child.
            WeightSyncError: the model may have weights of two versions.
            RuntimeError: called inside the gate, where nothing is installed.
        """
        self.require_begun()
        if process_gate().held_here:
            raise RuntimeError("call receive() outside any forward and any wsync.gate() block")
        end_returned = self._end_returned
        taken = self._wait(deadline_in(timeout), lambda: self._take(take))
        with self._guard:
            if taken is None and self.closed and self.version <= self.last_returned:
                if end_returned or self.phase is Phase.LOST:
                    raise self.ended()
                self._end_returned = True
        return taken

    def wait_first(self, timeout: float) -> bool:
        """Wait until there is a version, the connection has ended, or ``timeout`` seconds have passed.

        Returns whether there is a version. It does not count as returned.
        """
        return self._wait(deadline_in(timeout), lambda: self.version or None) is not None

    def _wait(self, deadline: float | None, attempt: Callable[[], Any]) -> Any | None:
        """Wait until ``attempt``, called inside the gate after each change, returns a result; return that.

        Returns None at the deadline, and when the connection has ended.
        """
        waiter = object()
        try:
            self._set_waiting(waiter, True)
            with without_forward():
                process_gate().call_with_deadline(deadline, None, bool)  # a published version is installed on the way
                while True:
                    self._wait_for_change(deadline)
                    result = process_gate().call_with_deadline(deadline, self._subject, attempt)
                    if result is not None or self.closed or remaining(deadline) == 0.0:
                        return result  # else another thread has taken that version
        finally:
            self._set_waiting(waiter, False)

    def require_begun(self) -> None:
        """Check that this process has called ``connect`` or ``begin_connect``: else no version would ever arrive.

        Raises:
            NotConnected: it has called neither; or it is a forked child of the one that has.
        """
        self.require_not_forked()
        if self.phase is Phase.NEW:
            raise NotConnected("not connected yet: call connect(worker_idx=…) before receive() and pull()")

    def ended(self) -> NotConnected:
        """Return the error of a call that waits for a version after the end of the connection."""
        if self.phase is Phase.FINISHED:
            return NotConnected("the sender (or this end) has shut down: there will be no more weights")
        return NotConnected(
            "the sender died, ended without shutdown(), or has disconnected this worker: there will be no more weights"
        )

    def mark_returned(self) -> int:
        """Return the version that the model has, which ``wait_next`` does not return afterwards. Called in the gate."""
        self.last_returned = self.version
        return self.version

    def _take(self, take: Callable[[], Any]) -> Any | None:
        if self.version <= self.last_returned:
            return None
        self._updater.require_one_version()
        taken, self.last_returned = take(), self.version
        return taken

    def _wait_for_change(self, deadline: float | None) -> None:
        """Wait until there is a newer version, the connection has ended, or the deadline has passed."""
        with self._guard:
            self._changed.wait_for(self._has_changed, remaining(deadline))

    def _has_changed(self) -> bool:
        return self.version > self.last_returned or self.closed

    def wake_only_for_receive(self) -> None:
        """Have the sender wake this worker only while a thread waits in ``receive``: else a forward installs."""
        self._wakeups_only_for_receive = True
        with self._guard:
            self._set_wakeups()

    def _set_waiting(self, waiter: object, waiting: bool) -> None:
        """Record whether ``waiter`` waits. Both calls may be made again: a signal handler may raise in either."""
        with self._guard:
            waiters = self._updater.waiting
            waiters.add(waiter) if waiting else waiters.discard(waiter)
            self._set_wakeups()

    def _set_wakeups(self) -> None:
        arena = self._channel.arena
        if arena is not None and not self.closed:
            arena.set_wakeups(bool(self._updater.waiting) or not self._wakeups_only_for_receive)
