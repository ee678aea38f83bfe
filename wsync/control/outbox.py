"""Ordered sending that does not wait for a slow peer. Each ``SocketConnection`` has one outbox."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

from wsync.deadlines import remaining

_DROP_FROM = 1000  # with this many messages queued, a message that may be dropped is dropped


class Outbox:
    """Sends data in order: at once while the socket has room, else by a background thread.

    Any thread may call ``put`` and ``flush``, also while another thread is in one of them.

    Args:
        send_now: sends what the socket has room for, without waiting; returns the number of bytes sent.
        send_all: sends data and descriptors; returns when all is sent.

    Both raise ConnectionError if the connection has broken.
    """

    def __init__(
        self, send_now: Callable[[bytes, Sequence[int]], int], send_all: Callable[[bytes, Sequence[int]], None]
    ) -> None:
        self._send_now = send_now
        self._send_all = send_all
        self._lock = threading.Lock()
        self._waiting: deque[tuple[bytes, Sequence[int]]] = deque()
        self._thread: threading.Thread | None = None
        self._error: ConnectionError | None = None

    @property
    def busy(self) -> bool:
        """Whether the thread is sending. It stays True after the thread has failed; ``put`` then raises the error."""
        return self._thread is not None

    def put(self, data: bytes, fds: Sequence[int] = (), *, may_drop: bool = False) -> None:
        """Send ``data``.

        Args:
            data: of one message.
            fds: open descriptors to send with it; the caller may close them afterwards.
            may_drop: drop it if the socket has no room at all, or ``_DROP_FROM`` messages are queued.

        Raises:
            ConnectionError: the connection has broken, now or while earlier data was sent.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._thread is None:
                sent = self._send_now(data, fds)
                if sent == len(data) or (may_drop and not sent):
                    return
                # If a part was sent, the descriptors went with its first byte.
                self._waiting.append((data[sent:], [] if sent else _duplicates(fds)))
                thread = threading.Thread(target=self._run, name="wsync-outbox", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # the limit of threads; what was sent may be half a message
                    self._error = ConnectionError(f"no thread could be started to send a message: {error}")
                    raise self._error from error
                self._thread = thread  # after start(): ``flush`` may join it at once
            elif not may_drop or len(self._waiting) < _DROP_FROM:
                self._waiting.append((data, _duplicates(fds)))

    def _run(self) -> None:
        try:
            while (waiting := self._next()) is not None:
                data, fds = waiting
                try:
                    self._send_all(data, fds)
                finally:
                    _close_all(fds)
        except ConnectionError as error:
            self._error = error

    def _next(self) -> tuple[bytes, Sequence[int]] | None:
        with self._lock:
            if not self._waiting:
                self._thread = None
                return None
            return self._waiting.popleft()

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
        """Wait for the thread, which ends because the caller has shut the socket down. No ``put`` may follow."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():  # it may run a finalizer that closes this
            thread.join()
        while self._waiting:
            _close_all(self._waiting.popleft()[1])


def _duplicates(fds: Sequence[int]) -> list[int]:
    return [os.dup(fd) for fd in fds]


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
