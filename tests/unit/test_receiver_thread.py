"""The thread that serves every connection of a process."""

from __future__ import annotations

import gc
import os
import threading

import pytest

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


class Blocking:
    """Handles an eventfd; a call ends when ``released`` is set."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.called, self.released = threading.Event(), threading.Event()

    def on_readable(self) -> bool:
        os.eventfd_read(self._descriptor)
        self.called.set()
        self.released.wait(30.0)
        return True


def test_a_handler_is_unregistered_although_another_one_runs() -> None:
    """One scheme shuts down while another one receives weights; its own handler is waited for."""
    first, second = (os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2))
    blocking, other = Blocking(first), Blocking(second)
    receiver_thread().register(blocking, first, [first])
    receiver_thread().register(other, second, [second])
    os.eventfd_write(first, 1)
    assert blocking.called.wait(30.0)
    receiver_thread().unregister(other)  # returns although `blocking` was not released
    ending = threading.Thread(target=receiver_thread().unregister, args=[blocking])
    ending.start()
    ending.join(0.1)
    assert ending.is_alive()
    blocking.released.set()
    ending.join(30.0)
    assert not ending.is_alive() and not other.called.is_set()
    os.close(first)
    os.close(second)


def test_a_signal_handler_may_unregister_inside_register(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    ready = os.eventfd(0, os.EFD_NONBLOCK)
    handler = Blocking(ready)

    def start_and_unregister(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "wsync-receiver":
            receiver_thread().unregister(handler)

    monkeypatch.setattr(threading.Thread, "start", start_and_unregister)
    calling = threading.Thread(target=receiver_thread().register, args=[handler, ready, [ready]], daemon=True)
    calling.start()
    calling.join(30.0)
    assert not calling.is_alive()
    receiver_thread().unregister(handler)
    os.close(ready)
