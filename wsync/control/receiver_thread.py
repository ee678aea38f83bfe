"""The receiver thread: one per process, one loop, for every connection of every receiver in the process."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from wsync.gate import without_forward
from wsync.per_process import per_process

_log = logging.getLogger(__name__)


class MessageHandler(Protocol):
    """Handles the messages of one connection, e.g. a worker's ``ModelUpdater``."""

    def on_readable(self) -> bool:
        """Read and process one message. Called each time the connection is readable: see ``Connection.attach``.

        Returns:
            False when there will be no more messages: the connection is then no longer watched.

        Raises:
            BaseException: anything; it is logged, and the connection is shut down.
        """
        ...


class ReceiverThread:
    """The thread that waits for all connections of this process at once.

    It runs from the first ``register`` until the last handler is unregistered. Any thread may call the methods.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may call `unregister` inside `register`
        self._calling = threading.RLock()  # held while a handler runs
        self._running: MessageHandler | None = None  # the handler that runs, or is about to
        # descriptor -> (handler, descriptor of its connection)
        self._handlers: dict[int, tuple[MessageHandler, int]] = {}
        self._thread: threading.Thread | None = None
        self._wake = -1

    def register(self, handler: MessageHandler, socket_fd: int, descriptors: Sequence[int]) -> None:
        """From now on call ``handler.on_readable()`` each time a connection is readable.

        Args:
            handler: the handler of the connection.
            socket_fd: the connection's descriptor; or, for a watched store, that of inotify or an eventfd.
            descriptors: that descriptor, and the peer's pidfd if there is one. Once the peer has exited, the connection
                is shut down: a forked child of the peer may keep its copy of the socket open.
        """
        with self._lock:
            if self._thread is None:
                wake = os.eventfd(0, os.EFD_CLOEXEC)
                thread = threading.Thread(target=self._run, args=(wake,), name="wsync-receiver", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the limit of threads
                    os.close(wake)
                    raise
                self._wake, self._thread = wake, thread  # a former thread that is still running ends by itself
            self._handlers.update(dict.fromkeys(descriptors, (handler, socket_fd)))
            os.eventfd_write(self._wake, 1)

    def unregister(self, handler: MessageHandler) -> None:
        """Stop calling ``handler``. On return the handler is not running, unless the handler itself called this."""
        with self._lock:
            self._handlers = {fd: other for fd, other in self._handlers.items() if other[0] is not handler}
            thread, last = self._thread, not self._handlers
            if thread is not None:
                if last:
                    self._thread = None
                os.eventfd_write(self._wake, 1)
        if self._running is handler:  # wait for this handler alone: another one may run for long (it receives weights)
            with self._calling:
                pass
        if thread is not None and last and thread is not threading.current_thread():
            thread.join()

    @without_forward()
    def _run(self, wake: int) -> None:
        try:
            while True:
                with self._lock:
                    if self._thread is not threading.current_thread():
                        return
                    handlers = dict(self._handlers)
                poller = select.poll()
                for descriptor in (wake, *handlers):
                    poller.register(descriptor, select.POLLIN)
                while not self._serve(poller, handlers, wake):
                    pass
        finally:
            with self._lock:
                if self._thread is threading.current_thread():  # after an error: the next registration starts a thread
                    self._thread, self._wake = None, -1
                os.close(wake)

    def _serve(self, poller: select.poll, handlers: dict[int, tuple[MessageHandler, int]], wake: int) -> bool:
        """Wait once and call handlers; return True when the set of handlers has changed."""
        changed = False
        for descriptor, _ in poller.poll():
            if descriptor == wake:
                os.eventfd_read(wake)
                changed = True
                continue
            with self._calling:
                # `_running` is stored before `_serve_one` reads `_handlers`; `unregister` changes `_handlers` before it
                # reads `_running`. So this thread sees that the handler was removed, or `unregister` waits for it.
                self._running = handlers[descriptor][0]
                try:
                    changed |= self._serve_one(descriptor, handlers)
                finally:
                    self._running = None
        return changed

    def _serve_one(self, descriptor: int, handlers: dict[int, tuple[MessageHandler, int]]) -> bool:
        """Call the handler of a readable descriptor; return True when the set of handlers has changed."""
        # Unregistered since poll(), or the descriptor number was reused by another connection.
        if self._handlers.get(descriptor) is not handlers[descriptor]:
            return False
        handler, socket_fd = handlers[descriptor]
        if descriptor != socket_fd:  # a pidfd: the peer has exited; what it sent before is still read
            with suppress(OSError):
                _shut_down(socket_fd)
        elif self._call(handler, socket_fd):
            return False
        # If ``descriptor`` is the socket, the connection has ended: stop watching it, and the pidfd registered with it.
        # Both have the entry ``(handler, descriptor)``.
        # If it is the pidfd, stop watching it alone, because the socket still has to be read to its end.
        with self._lock:
            finished = [fd for fd, one in handlers.items() if fd == descriptor or one == (handler, descriptor)]
            for fd in finished:
                if self._handlers.get(fd) is handlers[fd]:
                    del self._handlers[fd]
        return True

    def _call(self, handler: MessageHandler, socket_fd: int) -> bool:
        """Call a handler; False when there will be no more messages.

        If the handler raises, its connection is shut down, if it is a socket, which both sides notice. The handler is
        then called once more, to read the end of the stream and clean up. The thread continues, since it serves other
        receivers as well.
        """
        for _ in range(2):
            try:
                return handler.on_readable()
            except BaseException:  # noqa: BLE001  an error of one receiver must not end the thread of all
                _log.exception("a receiver raised an error; its connection is shut down, if it is a socket")
            if self._handlers.get(socket_fd) != (handler, socket_fd):
                return False  # the handler has closed its connection; another one may have the descriptor's number
            with suppress(OSError):  # the peer has closed it, or it is no socket
                _discard(socket_fd)
        return False


@contextmanager
def _as_socket(descriptor: int) -> Iterator[socket.socket]:
    sock = socket.socket(fileno=descriptor)  # OSError: it is no socket
    try:
        yield sock
    finally:
        sock.detach()  # its owner closes the descriptor


def _discard(descriptor: int) -> None:
    """Shut a connection down, and discard unread data."""
    _shut_down(descriptor)
    with _as_socket(descriptor) as sock:
        while sock.recv(1 << 16):
            pass


def _shut_down(descriptor: int) -> None:
    """Shut a connection down for both sides; data that has arrived can still be read."""
    with _as_socket(descriptor) as sock:
        sock.shutdown(socket.SHUT_RDWR)


receiver_thread = per_process(ReceiverThread)
"""Returns this process's receiver thread."""
