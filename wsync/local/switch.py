"""One worker's words in shared memory: the slot that it is pointed to, and those that it uses (see ``arena.py``)."""

from __future__ import annotations

from contextlib import suppress

from wsync.errors import SyncTimeout
from wsync.local import mutex
from wsync.local.mutex import Mutex

BLOCK = 128  # bytes per worker: the mutex, then words
SWITCH, USED, HELD, TAKEN, CALL, AWAITED = range(mutex.SIZE // 8, mutex.SIZE // 8 + 6)
NONE = -1


class Switch:
    """One worker's words in the arena.

    The sender calls ``reset``, ``publish``, ``published``, ``needed``, ``await_free`` and ``vacate``; the worker
    ``enter``, ``let_go``, ``leave`` and ``call``.
    """

    __slots__ = ("_at", "_mutex", "_words")

    def __init__(self, words: memoryview, address: int, at: int) -> None:
        self._words = words
        self._at = at
        self._mutex = Mutex(address, words)

    @property
    def place(self) -> tuple[memoryview, int]:
        """The words of which these are some, and where they begin."""
        return self._words, self._at

    def reset(self) -> None:
        """The state before anything was published: version 0, nothing used, calls wanted."""
        for word, value in ((SWITCH, 0), (USED, NONE), (HELD, NONE), (TAKEN, 0), (CALL, 1), (AWAITED, 0)):
            self._words[self._at + word] = value

    def publish(self, version: int, slot: int, acknowledge: bool, timeout: float | None) -> bool:
        """Point the worker to a slot; whether it wants to be called about it."""
        words, at = self._words, self._at
        try:
            self._mutex.lock(timeout)
            words[at + SWITCH] = version << 16 | slot << 1 | acknowledge
            return bool(words[at + CALL])
        finally:
            self._mutex.unlock()

    def published(self) -> tuple[int, int]:
        """``(version, slot)`` that the worker is pointed to; version 0 for nothing yet."""
        value = self._words[self._at + SWITCH]
        return value >> 16, value >> 1 & 0x7FFF

    def needed(self, again: bool) -> tuple[int, int, int]:
        """Slots that the worker may yet enter, that its forward uses, and that it holds to fall back on; or ``NONE``.

        Args:
            again: whether it, or a successor, may enter a slot that it has taken already.
        """
        words, at = self._words, self._at
        version, slot = self.published()
        named = slot if version and (again or words[at + TAKEN] < version) else NONE  # in this order: see enter
        return named, words[at + USED], words[at + HELD]

    def vacate(self, timeout: float) -> None:
        """The worker has died: nothing is in use, and who comes in its place has taken nothing.

        Args:
            timeout: seconds; one that is only taken for dead may be stopped inside its mutex.
        """
        try:
            with suppress(SyncTimeout):
                self._mutex.lock(timeout)
            for word, value in ((HELD, NONE), (USED, NONE), (AWAITED, 0), (TAKEN, 0)):
                self._words[self._at + word] = value
        finally:
            self._mutex.unlock()

    def await_free(self, timeout: float | None) -> bool:
        """Ask to be told when the worker's forward ends; False if none runs."""
        words, at = self._words, self._at
        try:
            self._mutex.lock(timeout)
            busy = words[at + USED] != NONE
            words[at + AWAITED] = busy
            return busy
        finally:
            self._mutex.unlock()

    def enter(self, version: int, slot: int, hold: bool) -> tuple[int, int, bool]:
        """Begin to use the newest of the published slot and the one that the model is on (``version``, ``slot``).

        Args:
            version: the newest version that the worker need not be given again.
            slot: where the model is bound; -1 if it has memory of its own.
            hold: keep ``slot`` safe as well until ``let_go`` or ``leave``, because installing the new one may fail.

        Returns:
            ``(version, slot, acknowledge)`` of what is now in use.
        """
        words, at = self._words, self._at
        try:
            self._mutex.lock()
            value = words[at + SWITCH]
            newer = value >> 16 > version
            if newer:
                if hold:
                    words[at + HELD] = slot
                version, slot = value >> 16, value >> 1 & 0x7FFF
            # The sender looks without the mutex, at TAKEN, then USED, then HELD: what says that a slot is needed is
            # stored before what said so until now goes.
            words[at + USED] = slot
            if newer:
                words[at + TAKEN] = version
            return version, slot, bool(value & 1)
        finally:
            self._mutex.unlock()

    def let_go(self) -> None:
        """The new slot is installed: the one before need not be kept any more."""
        self._words[self._at + HELD] = NONE

    def leave(self, keep: int = NONE) -> bool:
        """End the use of slots, but of ``keep``; whether the sender waits to be told."""
        words, at = self._words, self._at
        try:
            self._mutex.lock()
            words[at + HELD] = keep  # first: see enter
            words[at + USED] = NONE
            awaited = words[at + AWAITED]
            words[at + AWAITED] = 0
            return bool(awaited)
        finally:
            self._mutex.unlock()

    def call(self, wanted: bool) -> None:
        """Say whether a publish without acknowledgement shall call this worker."""
        try:
            self._mutex.lock()
            self._words[self._at + CALL] = wanted
        finally:
            self._mutex.unlock()
