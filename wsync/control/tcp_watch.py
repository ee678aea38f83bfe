"""A thread that shuts a TCP connection down if the peer's machine, or the network to it, has failed.

A machine that fails does not close its connections. The kernel's keepalive notices the failure, but only on a
connection without unacknowledged data; otherwise the kernel sends the data again and again, for a quarter of an hour.
The socket option TCP_USER_TIMEOUT would shorten that, but it also closes the connection to a process that is alive and
does not read, because it is stopped or busy. The kernel of such a process still acknowledges data, and answers probes.
So this thread checks whether the peer's kernel answers.

If the peer's process had not read for some time before the failure, so that its receive buffer was full, the kernel
asks at growing intervals, up to two minutes, whether there is room. The failure is then noticed about ten seconds after
the next such question.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from weakref import WeakKeyDictionary

from wsync.per_process import per_process

_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 4),  # seconds without data before the first probe
    (socket.TCP_KEEPINTVL, 2),  # seconds between probes
    (socket.TCP_KEEPCNT, 3),  # unanswered probes
)
_INTERVAL = 2.0  # seconds between two checks
_CHECKS = 5  # a peer has failed if its kernel is silent at this many checks in succession
_TCP_INFO = struct.Struct("8B13I")  # the beginning of the kernel's struct tcp_info
# Indices of its fields: data sent again, and probes sent, since the last answer; milliseconds since the last answer.
_RETRANSMITS, _PROBES, _LAST_ACK = 2, 3, 20


class TcpWatch:
    """The thread of one process; it runs while there are sockets to watch. Any thread may call the methods."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may call ``remove`` inside any of the methods
        # for each watched socket: how many checks in a row found no answer
        self._silent_checks: WeakKeyDictionary[socket.socket, int] = WeakKeyDictionary()
        self._thread: threading.Thread | None = None
        self._starting = False
        self._stop = threading.Event()

    def add(self, sock: socket.socket) -> None:
        """Watch a connected TCP socket until ``remove``: if the peer's machine fails, shut the socket down."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        with self._lock:
            self._silent_checks[sock] = 0
            if self._thread is None:
                stop = threading.Event()
                thread = threading.Thread(target=self._run, args=(stop,), name="wsync-tcp-watch", daemon=True)
                self._starting = True
                try:
                    thread.start()
                    self._stop, self._thread = stop, thread
                finally:
                    self._starting = False

    def remove(self, sock: socket.socket) -> None:
        """Stop watching a socket; after the last one, wait until the thread has ended. Idempotent."""
        if self._starting:
            # In ``add``, with the lock held, ``Thread.start()`` waits for the new thread to signal that it runs. A
            # finalizer that runs in the new thread before that signal may call this method: do not wait for the lock.
            # The thread ends by itself when no socket is left.
            self._silent_checks.pop(sock, None)
            return
        with self._lock:
            self._silent_checks.pop(sock, None)
            thread = self._thread
            if self._silent_checks or thread is None:
                return
            self._thread = None
            self._stop.set()
        if thread is not threading.current_thread():
            thread.join()

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(_INTERVAL):
            # Not blocking: a finalizer may call ``remove`` inside ``add``, which has the lock, and join this thread.
            if not self._lock.acquire(blocking=False):
                continue
            try:
                if stop.is_set():
                    return
                if not self._silent_checks:  # all were dropped without ``remove``
                    self._thread = None
                    return
                self._check()
            except BaseException:
                self._thread = None  # the next ``add`` starts a thread
                raise
            finally:
                self._lock.release()

    def _check(self) -> None:
        for reference in self._silent_checks.keyrefs():
            sock = reference()
            if sock is None or (checks := self._silent_checks.get(sock)) is None:  # removed by a finalizer
                continue
            try:
                info = _TCP_INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
            except OSError:  # it has been closed
                continue
            self._silent_checks[sock] = checks = checks + 1 if info[_RETRANSMITS] or info[_PROBES] else 0
            # Data may be sent again at each check although the peer answers in between (a busy connection on a network
            # that loses packets). So the last answer must also be older than the first of these checks.
            answered_since = info[_LAST_ACK] < 1000 * _INTERVAL * (_CHECKS - 1)
            if checks >= _CHECKS and not answered_since:
                with suppress(OSError):  # the connection has ended
                    sock.shutdown(socket.SHUT_RDWR)


tcp_watch = per_process(TcpWatch)
"""Returns this process's watch."""
