"""The thread that serves every connection of a process."""

from __future__ import annotations

import gc
import os
import threading

from wsync.control.receiver_thread import receiver_thread


class Refusing:
    """Handles an eventfd, as a reader of a store does; the first call raises."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.calls = 0
        self.finished = threading.Event()

    def on_readable(self) -> bool:
        self.calls += 1
        if self.calls == 1:
            raise ArithmeticError
        os.eventfd_read(self._descriptor)
        self.finished.set()
        return True


def test_a_handler_without_a_connection_that_raises_costs_no_descriptor() -> None:
    ready = os.eventfd(0, os.EFD_NONBLOCK)
    handler = Refusing(ready)
    gc.collect()  # closes what earlier tests have left
    before = len(os.listdir("/proc/self/fd"))
    receiver_thread().register(handler, ready, [ready])
    try:
        os.eventfd_write(ready, 1)
        assert handler.finished.wait(30.0)
    finally:
        receiver_thread().unregister(handler)
    assert handler.calls == 2
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(ready)
