"""The background thread: one per process, one loop, for every receiver that is told by a descriptor."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from contextlib import suppress
from typing import Protocol

from wsync.words import Line

_log = logging.getLogger(__name__)


class Told(Protocol):
    """A receiver, as the loop sees it."""

    def heed(self) -> bool:
        """Do what the sender said; False when there will be nothing more."""
        ...


class ReceiverThread:
    """Waits for all senders of this process at once, and costs nothing meanwhile.

    It runs while somebody is registered, and is joined with the last one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._serving = threading.RLock()  # held while a receiver heeds
        self._told: dict[int, tuple[Told, int]] = {}  # by descriptor; and that of its line
        self._thread: threading.Thread | None = None
        self._wake = -1

    def listen(self, line: Line, receiver: Told) -> None:
        """Listen for ``receiver``, on its line; the end of the process at the other end ends that."""
        self._add({sign: (receiver, line.fileno()) for sign in line.signs})

    def register(self, descriptor: int, receiver: Told) -> None:
        """Listen for ``receiver``, on a descriptor."""
        self._add({descriptor: (receiver, descriptor)})

    def _add(self, told: dict[int, tuple[Told, int]]) -> None:
        with self._lock:
            self._told.update(told)
            if self._thread is not None:
                os.eventfd_write(self._wake, 1)
            else:
                self._wake = os.eventfd(0, os.EFD_CLOEXEC)
                self._thread = threading.Thread(
                    target=self._run, args=(self._wake,), name="wsync-receiver", daemon=True
                )
                self._thread.start()

    def unregister(self, receiver: Told) -> None:
        """Listen for ``receiver`` no more; return when the loop is surely not inside it."""
        with self._lock:
            self._told = {fd: other for fd, other in self._told.items() if other[0] is not receiver}
            thread = self._thread
            if thread is None:
                return
            last = not self._told
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
                    told = dict(self._told)
                poller = select.poll()
                for descriptor in (wake, *told):
                    poller.register(descriptor, select.POLLIN)
                while not self._serve(poller, told, wake):
                    pass
        finally:
            with self._lock:
                if self._thread is threading.current_thread():  # an error: who registers next begins anew
                    self._thread, self._wake = None, -1
                os.close(wake)

    def _serve(self, poller: select.poll, told: dict[int, tuple[Told, int]], wake: int) -> bool:
        """Serve whoever was told something; True when the list of receivers has changed."""
        changed = False
        for descriptor, _ in poller.poll():
            if descriptor == wake:
                os.eventfd_read(wake)
                changed = True
                continue
            with self._serving:
                if self._told.get(descriptor) is not told[descriptor]:
                    continue
                receiver, line = told[descriptor]
                if descriptor != line:  # a child that the other process has forked may keep its end open
                    with suppress(OSError):
                        _shut(line)
                elif _heed(receiver, line):
                    continue
                with self._lock:  # with its line goes what else is listened to for a receiver
                    over = [fd for fd, one in told.items() if fd == descriptor or one == (receiver, descriptor)]
                    for fd in over:
                        if self._told.get(fd) is told[fd]:
                            del self._told[fd]
                changed = True
        return changed


def _heed(receiver: Told, descriptor: int) -> bool:
    """Have a receiver heed; False when there will be nothing more.

    One that fails is hung up on: its sender hears of that at once, and it hears that its line has ended. Nothing that
    it raises ends the thread, which is others' as well.
    """
    for _ in range(2):
        try:
            return receiver.heed()
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
