"""A pair is formed by a thread of its own: what ``torch`` waits for there cannot be waited for together with a death.

Who gives up leaves the thread to itself. It ends when the store in which pairs meet is closed, or at its own deadline;
but while the store's process is stopped it does not end.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from wsync.deadlines import wait_readable
from wsync.errors import NotConnected, SyncTimeout
from wsync.network.pair import Incoming, Outgoing
from wsync.wire.words import Line

P = TypeVar("P", Incoming, Outgoing)
FormPair = Callable[[int, int, float | None], Callable[[], P]]
"""``(worker, generation, deadline) -> form``: one half of the rendezvous of a pair; ``form`` waits for the other."""


def formed(
    form: Callable[[], P],
    signs: Collection[int],
    has_gone: Callable[[], bool],
    deadline: float | None,
    left: list[threading.Thread] | None = None,
) -> P | None:
    """What ``form`` makes; None if one of ``signs`` was readable meanwhile, and the other end ``has_gone``.

    Args:
        form: waits for the other half.
        signs: descriptors.
        has_gone: asked when one of these is readable.
        deadline: of all this.
        left: gets the thread, where it was left to itself.

    Raises:
        TimeoutError: neither, until ``deadline``.
        RuntimeError: it could not be formed.
    """
    forming = _Forming(form)
    try:
        while not forming.wait(signs, deadline):
            if has_gone():
                return None
        return forming.result()
    finally:
        forming.close()
        if left is not None and forming.thread.is_alive():
            left.append(forming.thread)


def formed_beside(line: Line, form: Callable[[], Incoming], worker_idx: int, deadline: float | None) -> Incoming:
    """What ``form`` makes, in a worker that was let in. What is said on ``line`` is left to be read afterwards.

    Raises:
        NotConnected: ``line`` ended meanwhile.
        SyncTimeout: the sender did not do its part before ``deadline``.
        RuntimeError: it could not be formed.
    """
    with select.epoll() as ends:
        for descriptor in line.signs:
            ends.register(descriptor, select.EPOLLRDHUP if descriptor == line.fileno() else select.EPOLLIN)
        try:
            pair = formed(form, [ends.fileno()], lambda: True, deadline)
        except TimeoutError as error:
            raise SyncTimeout(
                f"worker {worker_idx} was let in, but its process group was not formed in time: is the sender stopped?"
            ) from error
    if pair is None:
        raise NotConnected(f"worker {worker_idx}: the sender went away before their process group was formed")
    return pair


class _Forming(Generic[P]):
    """A pair that is being formed.

    Args:
        form: makes it.
    """

    def __init__(self, form: Callable[[], P]) -> None:
        self._form = form
        self._done = os.eventfd(0, os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._pair: P | None = None
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="wsync-forming", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._pair = self._form()
        except BaseException as error:  # noqa: BLE001  raised where somebody waits
            self._error = error
        with self._lock:
            if self._done >= 0:
                os.eventfd_write(self._done, 1)
                return
        self._error = None  # nobody wants it any more
        if self._pair is not None:
            self._pair.close()

    def wait(self, signs: Collection[int], deadline: float | None) -> bool:
        """Whether it is over; False if one of ``signs`` was readable first.

        Raises:
            TimeoutError: neither, until ``deadline``.
        """
        ready = wait_readable([self._done, *signs], deadline)
        if not ready:
            raise TimeoutError("not in time")
        return self._done in ready

    def result(self) -> P:
        """The pair, when it is over.

        Raises:
            RuntimeError: it could not be formed.
        """
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                error = None  # its traceback has this frame in it: a circle would keep gloo's descriptors
        assert self._pair is not None, "it is over"
        return self._pair

    def close(self) -> None:
        """Wait for it no more."""
        with self._lock:
            os.close(self._done)
            self._done = -1
            self._error = None
