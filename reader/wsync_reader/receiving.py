"""What all readers have: a thread that brings versions, and the one moment at which a new version takes effect.

    the reader's thread   a version has come, whole and checked → stage → (all that it requires is here) → installed
    any other thread      with reader.weights(): …   ·   reader.receive()

A version is never changed once it is there. So it is installed by one assignment, and a block goes on with the version
that it began with. ``lock`` guards what the readers of this process have: models that are sent together arrive so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from wsync_reader.layout import NotConnected, SyncTimeout, Weights

lock = threading.Condition()
_readers: list[Reader] = []  # those of this process that are open
_log = logging.getLogger(__name__)
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # seconds between two attempts to reach the trainer, or the store
_CLOSING = 2.0  # seconds that ``close`` waits for the thread


class Stopped(Exception):
    """``close`` was called: ends the thread."""


class Reader:
    """Receives one model's weights. Made by ``wsync_reader.open``; any thread may call.

    Attributes:
        where, sender: the store or trainer, for people; and what identifies the trainer.
        newest: the weights that are installed; None before the first.
        finished: whether the trainer has shut down in order: there will be no more versions.
        closed: whether that is so, or ``close`` was called.
    """

    def __init__(self, where: str, worker: int) -> None:
        self.where, self.worker, self.sender = where, worker, ""
        self.newest: Weights | None = None
        self.finished = self.closed = False
        self.used = False  # whether the weights were asked for
        self.wanted = 0  # threads that wait for a version
        self.stop = threading.Event()
        self._staged: list[Weights] = []
        self._returned: Weights | None = None
        self._trouble: Exception | None = None
        self._ready = self._end_returned = False  # it has joined a trainer without weights; `receive` has told the end
        self._thread = threading.Thread(target=self._run, name="wsync-reader", daemon=True)

    # --- what a medium is ---

    def follow(self, deadline: float | None) -> None:
        """Bring versions until the trainer has shut down; any error: it cannot go on. Called by the reader's thread.

        ``deadline``, on ``time.monotonic``'s clock, is that of ``open``; None later.
        """
        raise NotImplementedError

    def wake(self) -> None:
        """Have ``follow`` look at ``stop``, ``wanted`` and ``has``. Called with the lock."""

    # --- the reader's thread ---

    def _run(self) -> None:
        pause = _SHORTEST_PAUSE
        while not self.stop.is_set():
            before = self.newest
            try:
                self.follow(None if self._is_ready else self._deadline)
                self.note(None, finished=True)
                return
            except Stopped:
                return
            except Exception as error:  # noqa: BLE001  of a file system, a socket, a message: `error` tells it
                if str(error) != self.error:
                    _log.warning("%s; version %d is kept", error, self.version)
                self.note(error)
            if not self._is_ready:  # `open` raises it
                return
            pause = _SHORTEST_PAUSE if self.newest is not before else min(2 * pause, _LONGEST_PAUSE)
            self.stop.wait(pause)

    def note(self, error: Exception | None, *, finished: bool = False) -> None:
        """Take note of what is wrong, of the end, or that all is well."""
        if error is not self._trouble or finished:
            with lock:
                self._trouble, self.finished, self.closed = error, finished, self.closed or finished
                lock.notify_all()

    def begin(self, sender: str, *, ready: bool = False) -> None:
        """Take note of the trainer: with another one, versions begin anew. ``ready``: it has none yet."""
        with lock:
            self._staged = [one for one in self._staged if one.sender == sender]
            self.sender, self._ready = sender, self._ready or ready
        self.note(None)

    def stage(self, weights: Weights) -> None:
        """Have a version installed as soon as all that it requires is here; newer ones take the place of older."""
        with lock:
            if weights.version > self.has:
                self._staged.append(weights)
                _install_staged()

    @property
    def has(self) -> int:
        """The version of the present trainer that is installed; 0 for none."""
        return 0 if self.newest is None or self.newest.sender != self.sender else self.newest.version

    # --- what a user calls ---

    def start(self, deadline: float | None) -> Self:
        """Wait for the first version; see ``wsync_reader.open``."""
        self._deadline = deadline
        with lock:
            _readers.append(self)
        try:
            self._thread.start()
            if not self._wait(deadline, lambda: self._is_ready or self._trouble or self.closed):
                raise SyncTimeout(f"{self.where}: there was no version in time")
            if not self._is_ready:
                raise self._trouble or NotConnected(f"{self.where} has shut down")
        except BaseException:
            self.close()
            raise
        self._returned = self.newest
        return self

    @property
    def version(self) -> int:
        """The version that a block would have that begins now; 0 before the first."""
        return 0 if self.newest is None else self.newest.version

    @property
    def error(self) -> str:
        """Why no version can come at present; empty while the trainer, or the store, is reached.

        The reader keeps the version that it has, and tries again and again.
        """
        return "" if self._trouble is None else str(self._trouble) or type(self._trouble).__name__

    def receive(self, timeout: float | None = None) -> Weights | None:
        """Wait for a version newer than the last one that was returned; at first, than the one that ``open`` found.

        Returns:
            The newest weights. None after ``timeout`` seconds, and once when the trainer, or this end, has shut down.

        NotConnected: the trainer, or the store, is not reached (``error``) when the time is over; without a timeout, at
        once. Or an earlier call has told a shutdown.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with lock:
            self.wanted, self.used = self.wanted + 1, True
            self.wake()
            try:
                self._wait(
                    deadline,
                    lambda: self.newest is not self._returned or self.closed or (timeout is None and self._trouble),
                )
            finally:
                self.wanted -= 1
            if self.newest is not self._returned:
                self._returned = self.newest
                return self._returned
            if self._end_returned or (self._trouble is not None and not self.closed):
                why = self.error or "the trainer (or this end) has shut down"
                raise NotConnected(f"version {self.version} is kept, no newer one comes: {why}") from self._trouble
            self._end_returned = self.closed
            return None

    @property
    def _is_ready(self) -> bool:
        return self._ready or self.newest is not None

    def _wait(self, deadline: float | None, ready: Callable[[], Any]) -> Any:
        with lock:
            return lock.wait_for(ready, None if deadline is None else max(0.0, deadline - time.monotonic()))

    @contextmanager
    def weights(self) -> Iterator[Weights]:
        """The gate: the newest weights, of one version, as long as the block runs; NotConnected: there are none yet."""
        with gate(self) as (weights,):
            yield weights

    def close(self) -> None:
        """End the thread, and tell the trainer. What was received stays. Idempotent."""
        with lock:
            self.closed = True
            self.stop.set()
            _readers[:] = [one for one in _readers if one is not self]
            self.wake()
            lock.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_CLOSING)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def gate(*readers: Reader) -> Iterator[tuple[Weights, ...]]:
    """The newest weights of several models at one moment: what is sent together is here together.

    NotConnected: one has no version yet.
    """
    with lock:
        found = list[Weights]()
        for reader in readers:
            reader.used = True
            if reader.newest is None:
                raise NotConnected(f"{reader.where}: there is no version yet")
            found.append(reader.newest)
    yield tuple(found)


def _install_staged() -> None:
    """Install the newest versions such that all models of a worker then have what each requires of the others."""
    waiting = {reader: [*reader._staged] for reader in _readers if reader._staged}
    early = next(iter(waiting), None)
    while early is not None:
        then = {(one.sender, one.worker): waiting[one][-1].version if one in waiting else one.has for one in _readers}
        lacks = [
            one
            for one, staged in waiting.items()
            if any(then.get((name, one.worker), least) < least for name, least in staged[-1].requires.items())
        ]
        if early := next(iter(lacks), None):
            waiting[early].pop()
            waiting = {reader: staged for reader, staged in waiting.items() if staged}
    for reader, staged in waiting.items():
        reader.newest = staged[-1]
        reader._staged = [one for one in reader._staged if one.version > staged[-1].version]
        reader.wake()
    lock.notify_all()
