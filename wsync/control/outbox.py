"""Ordered sending that does not wait for a slow peer. Each ``Connection`` has one outbox."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from wsync.deadlines import remaining

_CHUNK = 1 << 20  # bytes that are sent at once
_DROP_FROM = 1000  # with this many messages queued, a message that may be dropped is dropped


Parts = Sequence[memoryview | bytes]
"""The bytes of a message, or the rest of them, in order."""


class Send(Protocol):
    """See ``Outbox``."""

    def __call__(self, parts: Parts, fds: Sequence[int], sent: list[int], *, wait: bool) -> None:
        """Send; append the number of bytes sent to ``sent``, an empty list, or append nothing if there is no room."""
        ...


class Outbox:
    """Sends data in order: at once while the socket has room, else by a background thread.

    Any thread may call ``put`` and ``flush``, also while another thread is in one of them.

    Args:
        send: ``(parts, fds, sent, wait=…)`` sends what the socket has room for, ``fds`` with the first byte, and
            appends the number of bytes to ``sent`` in the same C call: a signal handler that raises between two calls
            would lose the number.
            With ``wait``, it waits for room for some time. It raises ConnectionError if the connection has broken.
            Called by the thread in ``put`` or by the background thread, one at a time.

    Attributes:
        busy: whether the thread is sending. It stays True after the thread has failed, or could not be started; ``put``
            then raises the error.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = threading.RLock()  # a signal handler, or a finalizer, may call ``put`` or ``close`` inside ``put``
        self._putter: int | None = None  # the thread in ``put``
        self._waiting: deque[tuple[bytes, Sequence[int]]] = deque()
        self._thread: threading.Thread | None = None
        self.busy = False
        self._error: ConnectionError | None = None

    def put(self, parts: Parts, fds: Sequence[int] = (), *, may_drop: bool = False) -> None:
        """Send one message.

        Args:
            parts: the message's bytes.
            fds: open descriptors to send with it; the caller may close them afterwards.
            may_drop: drop it if the socket has no room at all, or ``_DROP_FROM`` messages are queued.

        Raises:
            ConnectionError: the connection has broken, now or while earlier data was sent.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._putter is not None:
                raise ConnectionError("a signal handler or a finalizer has called put() inside put()")
            self._putter = threading.get_ident()
            try:
                self._put(parts, fds, may_drop)
            finally:
                self._putter = None

    def _put(self, parts: Parts, fds: Sequence[int], may_drop: bool) -> None:
        """See ``put``; called with the lock held."""
        if self.busy:
            if not may_drop or len(self._waiting) < _DROP_FROM:
                self._waiting.append((b"".join(parts), _duplicates(fds)))
            return
        sent: list[int] = []
        size = sum(map(len, parts))
        try:
            self._send(parts, fds, sent, wait=False)
            if sent == [size] or (may_drop and not sent):
                return
            thread = threading.Thread(target=self._run, name="wsync-outbox", daemon=True)
            # If a part was sent, the descriptors went with its first byte.
            self._waiting.append((b"".join(parts)[sum(sent) :], [] if sent else _duplicates(fds)))
            self.busy = True  # before start(): a signal handler may raise in it although the thread runs already
        except ConnectionError:
            raise
        except BaseException:  # a signal handler raised: a part may be sent, or queued with no thread to send it
            if self._waiting or 0 < sum(sent) < size:
                self._error = ConnectionError("the sending of an earlier message was interrupted")
            raise
        # Keep these two ``try`` adjacent: a signal handler that raised between them would leave ``busy`` True without a
        # thread. Python runs handlers only where a function begins, a loop repeats or a call has returned.
        try:
            thread.start()
        except RuntimeError as error:  # the limit of threads; what was sent may be half a message
            self._error = ConnectionError(f"no thread could be started to send: {error}")
            raise self._error from error
        except BaseException:  # a signal handler raised, perhaps before the thread began
            if thread.ident is None:
                self._error = ConnectionError("the sending of an earlier message was interrupted")
            else:
                self._thread = thread
            raise
        self._thread = thread  # after start(): ``flush`` may join it at once

    def _run(self) -> None:
        try:
            while (waiting := self._next()) is not None:
                data, fds = waiting
                try:
                    self._send_all(memoryview(data), fds)
                finally:
                    _close_all(fds)
        except ConnectionError as error:
            self._error = error

    def _send_all(self, left: memoryview, fds: Sequence[int]) -> None:
        """Send without a time limit: the peer may be stopped, and continued later."""
        while left:
            sent: list[int] = []
            self._send([left[:_CHUNK]], fds, sent, wait=True)
            left, fds = left[sum(sent) :], () if sent else fds

    def _next(self) -> tuple[bytes, Sequence[int]] | None:
        with self._lock:
            try:
                return self._waiting.popleft()
            except IndexError:  # caught, not tested for: ``close`` may empty it meanwhile
                self._thread, self.busy = None, False
                return None

    def flush(self, deadline: float | None) -> None:
        """Wait until all that was put before this call is sent, or until the deadline.

        Raises:
            ConnectionError: it could not be sent.
        """
        thread = self._thread
        if thread is not None:
            thread.join(remaining(deadline))
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Wait for the thread, which ends because the caller has shut the socket down. No ``put`` may follow.

        Any thread may call it, also in a finalizer or a signal handler.
        """
        # Without the lock: in put(), with the lock held, ``Thread.start()`` waits for the new thread to signal that it
        # runs. A finalizer that runs in the new thread before that signal may call this method.
        thread = self._thread
        # No join in the background thread itself, nor inside ``put``: the background thread may wait for the lock.
        if thread is not None and thread is not threading.current_thread() and self._putter != threading.get_ident():
            thread.join()
        with suppress(IndexError):
            while True:
                _close_all(self._waiting.popleft()[1])


def _duplicates(fds: Sequence[int]) -> list[int]:
    """Return new descriptors; ConnectionError if this process has none left."""
    duplicates: list[int] = []
    try:
        for fd in fds:
            duplicates.append(os.dup(fd))
    except OSError as error:
        _close_all(duplicates)
        raise ConnectionError(f"no descriptor is left to send one: {error}") from error
    return duplicates


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
