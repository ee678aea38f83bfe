"""The sender's part of an arena's words: pointing workers to slots, and finding slots that may be written.

``shm/arena.py`` explains why no slot is written while a forward uses it. ``WorkerSlot.take`` explains the order of the
loads and stores that are made without the mutex.
"""

from __future__ import annotations

import os
from contextlib import suppress

from wsync.errors import SyncTimeout, forked_child_error
from wsync.fast_path import FastUpdate
from wsync.loops.pack_plan import PackPlan
from wsync.loops.words import (
    CONNECTION,
    HELD_SLOT,
    MAX_SLOTS,
    NONE,
    PUBLISHED,
    SLOT_VERSION,
    USED_SLOT,
    WANTS_FREED,
    WANTS_WAKEUPS,
    Block,
    published_word,
    record_at,
    slot_in,
    version_in,
    words_of_arena,
)

# Of a worker that is not connected. The mutex and PUBLISHED are not among them: both are for the next worker too.
_VACANT = {CONNECTION: 0, HELD_SLOT: NONE, USED_SLOT: NONE, WANTS_WAKEUPS: 1, WANTS_FREED: 0}


class ArenaWriter:
    """Writes the words of one sender's arena. Used in the sender's process, by one thread at a time.

    That is the thread with the channel's lock; or, in the call that ``fast_update`` returns, the thread with the
    sender's lock, while no send-loop thread runs.

    Args:
        words: the words of the arena.
        workers: the number of workers.

    Raises:
        ValueError: ``words`` are too few.
    """

    def __init__(self, words: memoryview, workers: int, /) -> None:
        if workers < 0 or words_of_arena(workers) > len(words):
            raise ValueError("there are fewer words than workers need")
        self._words = words
        self._creator = os.getpid()
        self._blocks = [Block(words, worker) for worker in range(workers)]

    def _require_creator(self) -> None:
        if os.getpid() != self._creator:
            raise forked_child_error()

    def _block(self, worker: int) -> Block:
        if not 0 <= worker < len(self._blocks):
            raise IndexError(f"there is no worker {worker}")
        return self._blocks[worker]

    def initialise(self) -> None:
        """Make the mutexes and set all words: no worker is connected, and no version published. Called once."""
        for block in self._blocks:
            block.mutex.initialise()
            for word, value in {PUBLISHED: 0, **_VACANT}.items():
                block[word] = value

    def accept(self, worker: int, connection: int, /) -> None:
        """Give a worker's words to a new connection. Called after ``vacate``, before the worker is sent the number.

        Args:
            worker: its index.
            connection: a number above 0, which no connection of this worker had before.

        Raises:
            NotConnected: this process is a forked child.
        """
        self._require_creator()
        self._block(worker)[CONNECTION] = connection  # no process has this number yet: the mutex is not needed

    def set_slot_version(self, slot: int, version: int, /) -> None:
        """Record that a slot has the weights of ``version``; 0, before it is written."""
        if not 0 <= slot < MAX_SLOTS:
            raise IndexError(f"there is no slot {slot}")
        self._words[record_at(len(self._blocks), slot) + SLOT_VERSION] = version

    def publish(self, worker: int, version: int, slot: int, acknowledge: bool, timeout: float | None, /) -> bool:
        """Point a worker to a slot; return whether it has to be woken.

        Args:
            worker: its index.
            version: in the slot.
            slot: packed already.
            acknowledge: whether the worker has to acknowledge the version.
            timeout: seconds for the worker's mutex; None for no limit.

        Raises:
            SyncTimeout: the worker is stopped inside its mutex.
            NotConnected: this process is a forked child.
        """
        self._require_creator()
        block = self._block(worker)
        try:
            block.mutex.lock(timeout)
            block[PUBLISHED] = published_word(version, slot, acknowledge)
            return bool(block[WANTS_WAKEUPS])
        finally:
            block.mutex.unlock()

    def published(self, worker: int, /) -> tuple[int, int]:
        """Return the ``(version, slot)`` that a worker is pointed to; version 0 if there is none."""
        word = self._block(worker)[PUBLISHED]
        return version_in(word), slot_in(word)

    def occupied(self) -> tuple[set[int], set[int], set[int]]:
        """Return three sets of slots: those that published words name, that forwards use, and that workers hold.

        A published slot is needed even if its worker uses another one, or has copied it: a replacement of the worker
        would read it.
        """
        needed = [self._needed(block) for block in self._blocks]
        published, used, held = ({*slots} - {NONE} for slots in zip(*needed, strict=True))
        return published, used, held

    def _needed(self, block: Block) -> tuple[int, int, int]:
        """Return the three slots of one worker, or ``NONE``. The loads are in this order: see ``WorkerSlot.take``.

        If no worker is connected, a slot in the words is that of a worker that was stopped in its mutex when it was
        disconnected, and stored the slot afterwards: see ``vacate``.
        """
        word, used, held = block[PUBLISHED], block[USED_SLOT], block[HELD_SLOT]
        if not block[CONNECTION]:
            used = held = NONE
        return slot_in(word) if version_in(word) else NONE, used, held

    def await_free(self, worker: int, timeout: float | None, /) -> bool:
        """Have a worker send a message when its forward ends; return False if it has no slot in use.

        Raises:
            SyncTimeout, NotConnected: see ``publish``.
        """
        self._require_creator()
        block = self._block(worker)
        try:
            block.mutex.lock(timeout)
            used = block[USED_SLOT] != NONE
            block[WANTS_FREED] = used
            return used
        finally:
            block.mutex.unlock()

    def vacate(self, worker: int, timeout: float, /) -> None:
        """Reset the words of a worker that is dead, or treated as dead: no slot is in use. ``PUBLISHED`` stays.

        The worker may be stopped while it has the mutex: after ``timeout`` seconds its words are reset without it. If
        it is continued, it stores its words once more, before it unlocks the mutex. No replacement can have locked the
        mutex, and so have used a slot, before that.

        Raises:
            NotConnected: this process is a forked child.
        """
        self._require_creator()
        block = self._block(worker)
        try:
            with suppress(SyncTimeout):
                block.mutex.lock(timeout)
            for word, value in _VACANT.items():
                block[word] = value
        finally:
            block.mutex.unlock()

    def fast_update(
        self, plans: list[PackPlan], nbytes: int, descriptors: bytes, acknowledge: bool, /
    ) -> FastUpdate | None:
        """Return the call that does a whole update of all workers, see ``fast_path.py``. In Python there is none.

        The compiled call copies tensors into a free slot, points all workers to it, and waits for their answers.

        Args:
            plans: the plans of the slots that are mapped here.
            nbytes: the bytes of one copy of the weights; for reports.
            descriptors: bytes of an ``array("i")``: of each worker's connection, then of each worker's process.
            acknowledge: whether to wait for acknowledgements; otherwise it only looks for deaths and errors.

        Returns:
            The call. None if updates have to take the general path: a worker is missing or gone, or no file descriptor
            is left.
        """
        return None
