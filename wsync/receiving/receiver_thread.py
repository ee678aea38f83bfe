"""The background thread: one per process, one loop, for every receiver that listens at a descriptor."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from contextlib import suppress
from typing import Protocol

from wsync.wire.words import Line

_log = logging.getLogger(__name__)


class LineHandler(Protocol):
    """What is called when a line has something to read: a receiver, as the loop sees it."""

    def on_readable(self) -> bool:
        """Do what the sender said; False when there will be nothing more."""
        ...


class ReceiverThread:
    """Waits for all senders of this process at once, and costs nothing meanwhile.

    It runs while somebody is registered, and is joined with the last one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._serving = threading.RLock()  # held while a handler runs
        self._handlers: dict[int, tuple[LineHandler, int]] = {}  # by descriptor; and that of its line
        self._thread: threading.Thread | None = None
        self._wake = -1

    def listen(self, line: Line, receiver: LineHandler) -> None:
        """Listen for ``receiver``, on its line; the end of the process at the other end ends that."""
        self._add({sign: (receiver, line.fileno()) for sign in line.signs})

    def register(self, descriptor: int, receiver: LineHandler) -> None:
        """Listen for ``receiver``, on a descriptor."""
        self._add({descriptor: (receiver, descriptor)})

    def _add(self, handlers: dict[int, tuple[LineHandler, int]]) -> None:
        with self._lock:
            self._handlers.update(handlers)
            if self._thread is not None:
                os.eventfd_write(self._wake, 1)
            else:
                self._wake = os.eventfd(0, os.EFD_CLOEXEC)
                self._thread = threading.Thread(
                    target=self._run, args=(self._wake,), name="wsync-receiver", daemon=True
                )
                self._thread.start()

    def unregister(self, receiver: LineHandler) -> None:
        """Listen for ``receiver`` no more; return when the loop is surely not inside it."""
        with self._lock:
            self._handlers = {fd: other for fd, other in self._handlers.items() if other[0] is not receiver}
            thread = self._thread
            if thread is None:
                return
            last = not self._handlers
            if last:
                self._thread = None
            os.eventfd_write(self._wake, 1)
        if thread is threading.current_thread():
            return
        if last:
            thread.join()
        else:
            with self._serving:
                return

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
                if self._thread is threading.current_thread():  # an error: who registers next begins anew
                    self._thread, self._wake = None, -1
                os.close(wake)

    def _serve(self, poller: select.poll, handlers: dict[int, tuple[LineHandler, int]], wake: int) -> bool:
        """Serve whoever was told something; True when the list of receivers has changed."""
        changed = False
        for descriptor, _ in poller.poll():
            if descriptor == wake:
                os.eventfd_read(wake)
                changed = True
                continue
            with self._serving:
                if self._handlers.get(descriptor) is not handlers[descriptor]:
                    continue
                receiver, line = handlers[descriptor]
                if descriptor != line:  # a child that the other process has forked may keep its end open
                    with suppress(OSError):
                        _shut(line)
                elif _call(receiver, line):
                    continue
                with self._lock:  # with its line goes what else is listened to for a receiver
                    over = [fd for fd, one in handlers.items() if fd == descriptor or one == (receiver, descriptor)]
                    for fd in over:
                        if self._handlers.get(fd) is handlers[fd]:
                            del self._handlers[fd]
                changed = True
        return changed


def _call(receiver: LineHandler, descriptor: int) -> bool:
    """Have a receiver read; False when there will be nothing more.

    One that fails is hung up on: its sender hears of that at once, and it hears that its line has ended. Nothing that
    it raises ends the thread, which is others' as well.
    """
    for _ in range(2):
        try:
            return receiver.on_readable()
        except BaseException:  # noqa: BLE001  this thread is nobody's to end
            _log.exception("a receiver has failed, and is hung up on")
        with suppress(OSError):  # it has closed its line, or has ended already
            _hang_up(descriptor)
    return False


def _hang_up(descriptor: int) -> None:
    """End a line for both ends, and drop what has not been read of it."""
    _shut(descriptor)
    with socket.socket(fileno=os.dup(descriptor)) as line:
        while line.recv(1 << 16):
            pass


def _shut(descriptor: int) -> None:
    """End a line for both ends; what has come can be read."""
    with socket.socket(fileno=os.dup(descriptor)) as line:
        line.shutdown(socket.SHUT_RDWR)


_thread = ReceiverThread()


def _reset_in_child() -> None:
    global _thread
    _thread = ReceiverThread()


os.register_at_fork(after_in_child=_reset_in_child)


def receiver_thread() -> ReceiverThread:
    """The one of this process."""
    return _thread
