"""The words of an arena in shared memory: a block for each worker, then a record for each slot.

A *word* is an integer of 8 bytes. A worker's block is a mutex of ``mutex.SIZE`` bytes, then these words:

=================  =====================================================================================================
``PUBLISHED``      the version and slot that the worker's forwards have to use, see ``published_word``. Written by the
                   sender.
``USED_SLOT``      the slot that the running forward uses (or from which a worker copies); ``NONE`` between forwards.
                   Written by the worker.
``HELD_SLOT``      a slot that the worker needs between forwards as well, see ``WorkerSlot.hold``; or ``NONE``. Written
                   by the worker.
``CONNECTION``     the number of the connection that has the block; 0 if no worker is connected. Written by the sender.
                   A worker whose connection has another number leaves the words as they are.
``WANTS_WAKEUPS``  1 if the sender has to wake the worker for every update, 0 if only for those that it has to
                   acknowledge. Written by the worker.
``WANTS_FREED``    1 if the worker has to send ``SLOT_FREED`` when it no longer uses a slot. Set by the sender, cleared
                   by the worker.
=================  =====================================================================================================

All of them are stored with the mutex locked, except in two cases: ``ArenaWriter.accept`` stores ``CONNECTION`` without
it, and if a worker was stopped while it has the mutex, ``ArenaWriter.vacate`` resets the words without it.

A slot's record has these words, which the sender writes:

====================  ==================================================================================================
``SLOT_EXTRA_SIZE``   the bytes of its extra state
``SLOT_CHECKSUM``     its checksum, unsigned, if updates have one
``SLOT_VERSION``      the version of its weights; 0 from before the sender writes to the slot until it is published
====================  ==================================================================================================

The sender reads the workers' words without the mutex, and ``SLOT_VERSION`` is used without one. So the order of loads
and stores counts. The compiled classes use sequentially consistent ones. The Python classes use plain ones, which is
enough on x86-64. It is not on processors that reorder stores (aarch64): the guarantees of ``shm/arena.py`` need the
compiled classes there, and ``loops/__init__.py`` warns without them. The version of registered weights
(``shm/registered.py``) is always stored and read in Python, so their guarantees need x86-64.

``csrc/words.h`` is the same in C. ``shm/arena.py`` explains what it guarantees.
"""

from __future__ import annotations

import ctypes

from wsync.loops.mutex import SIZE, Mutex

BLOCK = 16  # words of a block
PUBLISHED, USED_SLOT, HELD_SLOT, CONNECTION, WANTS_WAKEUPS, WANTS_FREED = range(SIZE // 8, SIZE // 8 + 6)
RECORD = 3  # words of a record
SLOT_EXTRA_SIZE, SLOT_CHECKSUM, SLOT_VERSION = range(RECORD)
NONE = -1
MAX_SLOTS = 1024
_SLOT_BITS = 15  # in a published word


def words_of_arena(workers: int) -> int:
    """Return how many words there are in all."""
    return workers * BLOCK + MAX_SLOTS * RECORD


def record_at(workers: int, slot: int) -> int:
    """Return the index of the first word of a slot's record."""
    return workers * BLOCK + slot * RECORD


def published_word(version: int, slot: int, acknowledge: bool) -> int:
    """Return the word that points a worker to a slot; ``acknowledge``: whether the worker has to answer."""
    return version << (_SLOT_BITS + 1) | slot << 1 | acknowledge


def version_in(word: int) -> int:
    """Return the version in a published word; 0 for none."""
    return word >> (_SLOT_BITS + 1)


def slot_in(word: int) -> int:
    """Return the slot in a published word."""
    return word >> 1 & ((1 << _SLOT_BITS) - 1)


class Block:
    """The mutex and the words of one worker.

    Args:
        words: those of the arena.
        worker: the worker's index.

    Attributes:
        words: as given.
        at: the index of the block's first word.
        mutex: see the module.

    Raises:
        ValueError: ``words`` are too few.
    """

    __slots__ = ("at", "mutex", "words")

    def __init__(self, words: memoryview, worker: int) -> None:
        if worker < 0 or (worker + 1) * BLOCK > len(words):
            raise ValueError("there is no such block of words")
        self.words = words
        self.at = worker * BLOCK
        self.mutex = Mutex(ctypes.addressof(ctypes.c_char.from_buffer(words)) + self.at * 8, words)

    def __getitem__(self, word: int) -> int:
        return self.words[self.at + word]

    def __setitem__(self, word: int, value: int) -> None:
        self.words[self.at + word] = value
