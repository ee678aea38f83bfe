"""A line of tensors to a worker on the trainer's own machine: memory that both have mapped, in place of a group.

The trainer packs weights right into a slot of it, so there is nothing left to send: one word says which slot a worker
is to take, and the worker copies that. Nobody has to choose this: a worker that can open the trainer's memory is on its
machine, and any other one takes the group.

**Nothing torn is ever taken.** A slot is written only when no parcel lies in it (``lanes.py``), and a parcel lies in it
until the worker has answered, which has copied it by then. What remains is a worker that was given up while it copied:
one that is stopped, say. Its word is revoked before any slot is written again. And a worker that has copied reads its
word once more, as the reader of a seqlock does: the same word says that nothing was written meanwhile; another one,
that the line has ended. Words are read and written by system calls, which no processor reorders with what is around
them.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import threading
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wsync.memory import allocate, memory_file, whole_pages
from wsync.network.pair import GivenUp, Work

_SLOT_BITS = 16  # of a word; the rest is the generation
_WORD = struct.Struct("=Q")


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a trainer's memory is to be found, by who is on its machine. Travels in a pickled scheme.

    Attributes:
        pid: the trainer's.
        descriptor: the memory's, there.
        name: the memory's, which no other has.
        base: bytes before its first slot.
    """

    pid: int
    descriptor: int
    name: str
    base: int

    def open(self) -> int | None:
        """A descriptor to read it by; None from another machine, or where the trainer's process cannot be seen."""
        path = f"/proc/{self.pid}/fd/{self.descriptor}"
        try:
            if os.readlink(path) == f"/memfd:{self.name} (deleted)":
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # no such process, or somebody else's, or it has ended
            return None
        return None


class HostMemory:
    """A trainer's memory: a word for each worker, then slots of one size.

    Args:
        workers: how many there can be.

    Raises:
        WeightSyncError: the machine has no memory left for it.
    """

    def __init__(self, workers: int) -> None:
        self._pid, self._descriptor = os.getpid(), -1
        name, base = f"wsync-{secrets.token_hex(16)}", whole_pages(workers * _WORD.size)
        self._descriptor = memory_file(name, base)
        self.whereabouts = Whereabouts(self._pid, self._descriptor, name, base)
        self._slots: dict[int, int] = {}  # by address
        self._lock = threading.RLock()  # whoever forms a line that nobody wants any more closes it some time

    def room(self, nbytes: int) -> Tensor:
        """One more slot, ``uint8[nbytes]``, of as many bytes as all others.

        Raises:
            WeightSyncError: the machine has no memory left for it.
        """
        # Not how many there are: of one that was lost to a signal the address, and so the place here, may be had again.
        span, slot = whole_pages(nbytes), next(slot for slot in count() if slot not in self._slots.values())
        offset = self.whereabouts.base + slot * span
        allocate(self._descriptor, offset, span)
        memory = mmap.mmap(self._descriptor, span, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=offset)
        flat = torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]
        self._slots[flat.data_ptr()] = slot
        return flat

    def point(self, worker: int, generation: int, flat: Tensor) -> None:
        """Say which slot a worker is to take."""
        self._write(worker, generation << _SLOT_BITS | self._slots[flat.data_ptr()])

    def revoke(self, worker: int, generation: int) -> None:
        """A worker is to take nothing more, whatever it is doing; not if somebody else is in its place by now."""
        with self._lock:
            if self._descriptor < 0 or os.getpid() != self._pid:
                return
            if _word(self._descriptor, worker) >> _SLOT_BITS == generation:
                self._write(worker, 0)

    def _write(self, worker: int, word: int) -> None:
        os.pwrite(self._descriptor, _WORD.pack(word), worker * _WORD.size)

    def close(self) -> None:
        """Close the descriptor; the memory goes with who has mapped it. Harmless when repeated."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
            self._slots.clear()
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        """Nobody has closed it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)


class HostOutgoing:
    """The trainer's end of a line to a worker on its machine (``Outgoing``).

    Args:
        memory: which the worker has opened.
        worker: its index.
        generation: how many have been in its place, this one included.
    """

    in_memory = True

    def __init__(self, memory: HostMemory, worker: int, generation: int) -> None:
        self._memory, self._worker, self._generation = memory, worker, generation

    def send(self, flat: Tensor, works: list[Work]) -> None:
        """Point the worker to ``flat``, which is one of the slots."""
        self._memory.point(self._worker, self._generation, flat)
        works.append(_DONE)

    def close(self, under_way: Work | None = None) -> bool:
        """Revoke what the worker was pointed to; False: it cannot take it any more."""
        self._memory.revoke(self._worker, self._generation)
        return False


class HostIncoming:
    """The worker's end (``Incoming``).

    Args:
        whereabouts: of the trainer's memory.
        descriptor: of it; is owned by the line.
        worker: this one's index.
        generation: how many have been in its place, this one included.
    """

    in_memory = True

    def __init__(self, whereabouts: Whereabouts, descriptor: int, worker: int, generation: int) -> None:
        self._base = whereabouts.base
        self._descriptor = descriptor
        self._worker, self._generation = worker, generation
        self._slots: dict[int, Any] = {}
        self._words: memoryview | None = memoryview(self._map(0, whereabouts.base)).cast("Q")
        self._last = 0  # the word that said which slot was taken last

    def pointed(self) -> bool:
        """Whether this worker's word is another one than that of what it took last."""
        words = self._words
        if words is None:
            return False
        word = words[self._worker]
        return word != self._last and word >> _SLOT_BITS == self._generation

    def receive(self, flat: Tensor, works: list[Work]) -> None:
        """Add what takes, once it is waited for, the slot that this worker is pointed to by then."""
        works.append(_Copy(self, flat.numpy()))

    def take(self, target: Any) -> None:
        """Copy the slot that this worker is pointed to into ``target``, ``uint8[nbytes]``.

        Raises:
            GivenUp: the trainer has given this worker up, or the line is closed; or it cannot be mapped here.
        """
        word = _word(self._descriptor, self._worker) if self._descriptor >= 0 else 0
        generation, slot = word >> _SLOT_BITS, word & (1 << _SLOT_BITS) - 1
        if generation == self._generation:
            np.copyto(target, self._slot(slot, target.nbytes))
            if _word(self._descriptor, self._worker) == word:
                self._last = word
                return
        raise GivenUp(f"the trainer has given worker {self._worker} up")

    def _slot(self, slot: int, nbytes: int) -> Any:
        content = self._slots.get(slot)
        if content is None:
            span = whole_pages(nbytes)
            content = np.frombuffer(self._map(self._base + slot * span, span), np.uint8, nbytes)
            self._slots[slot] = content
        return content

    def _map(self, offset: int, nbytes: int) -> mmap.mmap:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        try:
            return mmap.mmap(self._descriptor, nbytes, flags=flags, prot=mmap.PROT_READ, offset=offset)
        except OSError as error:  # no more descriptors, or addresses, in this process
            raise GivenUp(f"worker {self._worker} cannot map the trainer's memory: {error}") from error

    def close(self, under_way: Work | None = None) -> bool:
        """Let the memory go; harmless when repeated."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        self._slots.clear()
        self._words = None
        return False

    def __del__(self) -> None:
        """Nobody has closed it: a signal struck as it was handed over, or whoever had it formed has just given up."""
        self.close()


class _Copy:
    """A transfer that begins, and ends, when it is waited for."""

    def __init__(self, line: HostIncoming, target: Any) -> None:
        self._line, self._target = line, target

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Do it."""
        self._line.take(self._target)
        return True


class _Done:
    """A transfer that was over as soon as it began."""

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Nothing is left to be waited for."""
        return True


_DONE = _Done()


def _word(descriptor: int, worker: int) -> int:
    """A worker's."""
    (word,) = _WORD.unpack(os.pread(descriptor, _WORD.size, worker * _WORD.size))
    return word
