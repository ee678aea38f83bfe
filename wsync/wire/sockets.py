"""Sockets of which children that were forked meanwhile may have copies."""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress


def end(sock: socket.socket, opener: int) -> None:
    """Close ``sock``; harmless when repeated.

    In the process that opened it (``opener``, its id) that ends it for every copy, so that the other end hears of it. A
    child that has inherited it only lets its copy go.
    """
    if os.getpid() == opener:
        with suppress(OSError):  # it has ended already, or was closed
            sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def require_opener(opener: int) -> None:
    """Say nothing through a socket that ``opener`` (a process's id) has opened, but in that process.

    Raises:
        ConnectionError: this is a child that has inherited it; what it says would pass for its parent's word.
    """
    if os.getpid() != opener:
        raise ConnectionError("this line is the parent's of this process")


class Outbox:
    """Sends what it is given in order: at once, but a long message, and what comes behind it, by a thread.

    For who should read it may be stopped, and whoever sends has others to send to.

    Args:
        send: returns when it is sent; raises ConnectionError if it cannot be, any more.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._thread: threading.Thread | None = None
        self._error: ConnectionError | None = None

    def put(self, data: bytes, *, long: bool) -> None:
        """Send ``data``.

        Raises:
            ConnectionError: it could not be sent, or something before it. Whoever reads the line hears of that, too.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._thread is None and long:
                self._thread = threading.Thread(target=self._run, name="wsync-words", daemon=True)
                self._thread.start()
            if self._thread is not None:
                self._waiting.append(data)
                return
        self._send(data)

    def _run(self) -> None:
        try:
            while (data := self._next()) is not None:
                self._send(data)
        except ConnectionError as error:
            self._error = error

    def _next(self) -> bytes | None:
        with self._lock:
            if not self._waiting:
                self._thread = None
                return None
            return self._waiting.popleft()

    def close(self) -> None:
        """Wait for the thread, when the socket has been shut down."""
        thread = self._thread
        if thread is not None:
            thread.join()
