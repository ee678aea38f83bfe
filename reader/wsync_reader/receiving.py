"""What all readers have: a thread that brings versions, and the one moment at which a new one is installed.

A version never changes. So it is installed by one assignment, and a block goes on with the one that it began with.
``lock`` guards what the readers of this process have: models that are sent together are installed together.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Self

from wsync_reader.layout import NotConnected, SyncTimeout, Weights

lock = threading.Condition()
_readers: list["Reader"] = []  # those of this process that are open
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # seconds between two attempts to reach the trainer, or the store
_CLOSING = 2.0  # seconds that ``close`` waits for the thread


class Reader(AbstractContextManager["Reader"]):
    """Receives one model's weights: ``newest`` are installed. Made by ``wsync_reader.open``; any thread may call.

    ``finished``: the trainer has shut down in order. ``closed``: that is so, or ``close`` was called.
    """

    def __init__(self, where: str, worker: int) -> None:
        self.where, self.worker, self.sender = where, worker, ""
        self.newest: Weights | None = None
        self.finished = self.closed = False
        self.used = 0, 0.0  # the version that was given out last, and when first, in Unix seconds
        self.wanted = 0  # threads that wait for a version
        self.stop, self._staged = threading.Event(), list[Weights]()
        self._returned: Weights | None = None
        self._trouble: Exception | None = None
        self._joined = self._end_returned = False  # it joined a trainer without weights; `receive` has told the end
        self._thread = threading.Thread(target=self._run, name="wsync-reader", daemon=True)

    def follow(self, deadline: float | None) -> None:
        """Bring versions until the trainer has shut down; any error: it cannot go on. Called by the reader's thread."""
        raise NotImplementedError

    def wake(self) -> None:
        """Have ``follow`` look at ``stop``, ``wanted`` and ``has``. Called with the lock."""

    def _run(self) -> None:
        pause = _SHORTEST_PAUSE
        while not self.stop.is_set():
            before = self.newest
            try:
                self.follow(None if self._is_ready else self._deadline)
                return self.note(None, finished=not self.stop.is_set())
            except Exception as error:  # noqa: BLE001  of a file system, a socket, a message: `error` tells it
                if self.stop.is_set():
                    return None
                if str(error) != self.error:
                    logging.getLogger(__name__).warning("%s; version %d is kept", error, self.version)
                self.note(error)
            if not self._is_ready:  # `open` raises it
                return None
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
            self.sender, self._joined = sender, self._joined or ready
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

    def start(self, deadline: float | None) -> Self:
        """Wait for the first version; see ``wsync_reader.open``."""
        self._deadline, timeout = deadline, None if deadline is None else deadline - time.monotonic()
        try:
            with lock:
                _readers.append(self)
                self._thread.start()
                lock.wait_for(lambda: self._is_ready or self._trouble or self.closed, timeout)
            if not self._is_ready:
                raise self._trouble or SyncTimeout(f"{self.where}: there was no version in time")
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
        """Why no version comes at present; the reader keeps its version, and tries again. Empty: all is well."""
        return "" if self._trouble is None else str(self._trouble) or type(self._trouble).__name__

    def receive(self, timeout: float | None = None) -> Weights | None:
        """Return the newest weights, once they are newer than those of the last call; at first, than ``open``'s.

        None: ``timeout`` seconds are over; and once, when the trainer or this end has shut down. NotConnected: when the
        time is over (without a timeout, at once), the trainer or store is not reached; or a shutdown was told before.
        """
        with lock:
            self.wanted, had = self.wanted + 1, self._returned
            self.wake()
            try:
                lock.wait_for(lambda: self.newest is not had or self.closed or (self._trouble and not timeout), timeout)
            finally:
                self.wanted -= 1
            if self.newest is not had:
                self._returned = self.newest
                self.mark_used()
                return self.newest
            if self._end_returned or (self._trouble is not None and not self.closed):
                why = self.error or "the trainer (or this end) has shut down"
                raise NotConnected(f"version {self.version} is kept, no newer one comes: {why}") from self._trouble
            self._end_returned = self.closed
            return None

    def mark_used(self) -> None:
        """Note that the newest version is given out. Called with the lock."""
        if self.used[0] != self.version:
            self.used = self.version, time.time()

    @property
    def _is_ready(self) -> bool:
        return self._joined or self.newest is not None

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

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def gate(*readers: Reader) -> Iterator[tuple[Weights, ...]]:
    """The newest weights of several models, of one moment; NotConnected: one has no version yet."""
    with lock:
        found = [reader.newest for reader in readers if reader.newest is not None]
        for reader in readers:
            reader.mark_used()
    if len(found) < len(readers):
        raise NotConnected(f"there is no version yet of {' or '.join(reader.where for reader in readers)}")
    yield tuple(found)


def _install_staged() -> None:
    """Install the newest versions such that all models of a worker then have what each requires of the others."""
    waiting = {reader: [*reader._staged] for reader in _readers if reader._staged}
    while True:
        then = {(one.sender, one.worker): waiting[one][-1].version if one in waiting else one.has for one in _readers}
        wanted = [(one, *item) for one, staged in waiting.items() for item in staged[-1].requires.items()]
        lacks = [one for one, sender, version in wanted if then.get((sender, one.worker), version) < version]
        if not lacks:
            break
        waiting[lacks[0]].pop()
        waiting = {reader: staged for reader, staged in waiting.items() if staged}
    for reader, staged in waiting.items():
        reader.newest = staged[-1]
        reader._staged = [one for one in reader._staged if one.version > staged[-1].version]
        reader.wake()
    lock.notify_all()
