"""One worker's words in shared memory: a mutex, the published version and slot, and the slots that the worker uses.

``shm/arena.py`` explains what they guarantee. ``csrc/words.h`` is the same layout in C.
"""

from __future__ import annotations

import ctypes

from wsync.loops.mutex import SIZE, Mutex

BLOCK = 128  # bytes per worker: the mutex, then the words
PUBLISHED, USED, HELD, TAKEN, WAKEUPS, AWAITED = range(SIZE // 8, SIZE // 8 + 6)
NONE = -1
MAX_SLOTS = 1 << 15


def published_word(version: int, slot: int, acknowledge: bool) -> int:
    """Return the word that points a worker to a slot."""
    return version << 16 | slot << 1 | acknowledge


def version_in(word: int) -> int:
    """Return the version in a published word; 0 for none."""
    return word >> 16


def slot_in(word: int) -> int:
    """Return the slot in a published word."""
    return word >> 1 & (MAX_SLOTS - 1)


class Block:
    """The words of one worker.

    Args:
        words: those of the arena, in items of 8 bytes.
        at: the index of this worker's first word.

    Attributes:
        words: the mapping of the arena.
        at: as given.
        mutex: held by the sender to store ``PUBLISHED``, by the worker to read it and store its own words.

    Raises:
        ValueError: ``words`` are too few.
    """

    __slots__ = ("at", "mutex", "words")

    def __init__(self, words: memoryview, at: int) -> None:
        if at < 0 or at + BLOCK // 8 > len(words):
            raise ValueError("there is no such block of words")
        self.words = words
        self.at = at
        self.mutex = Mutex(ctypes.addressof(ctypes.c_char.from_buffer(words)) + at * 8, words)

    def __getitem__(self, word: int) -> int:
        return self.words[self.at + word]

    def __setitem__(self, word: int, value: int) -> None:
        self.words[self.at + word] = value
