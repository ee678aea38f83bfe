"""Slots of shared memory for one model's weights, and the words that record which worker uses which slot.

A *word* is a control field of 8 bytes. The arena has two files, the second for the extra state of modules::

    file 1   one block per worker   BLOCK bytes: a mutex, then the worker's words
             two words per slot     the size of its extra state (all slots), then its checksum (all slots)
             slots                  from _slots_offset on; _slot_size bytes each: one version of the packed weights
    file 2   one extra per slot     every _EXTRA_SPAN bytes; sparse

**The promise.** For each worker the arena has a *published word* (version and slot), the slot that the worker's running
forward uses, and a mutex around both. The sender stores the published word while it holds the mutex. A worker that
enters a forward holds the same mutex while it reads the published word and records the slot as used. Therefore:

1. *Every forward that starts after a publish uses that version or a newer one.* It locks the mutex after the sender has
   unlocked it, so it reads the new word. The mutex also ensures that it sees the weights that were packed before.
2. *No slot is written while a forward uses it.* Before the sender writes slot ``s``, two conditions must hold: no
   published word names ``s``, and no worker uses ``s``. After storing, under each worker's mutex, a word naming another
   slot, it checks both conditions. A forward that uses ``s`` has read the word before that store. It recorded ``s``
   under the same lock, so the sender sees the record, or that the forward has ended. A forward that starts after the
   store cannot use ``s``, because no word names it.
3. *Three slots are enough* while all workers have one version: one published, one still in use, one free. If two are
   still in use, the sender waits for a forward to end, or for its worker to die. The arena grows by one slot for each
   further version that workers have (``worker_ids``, weights per worker), or keep in order to roll back to it.

A bound model uses its slot only during forwards. If installing may fail (checksum, extra state), the worker keeps the
previous version's slot until the new one is installed, so it occupies that slot between forwards too. A worker that
copies weights out needs a slot only from the publish until it has copied.

The memory is anonymous (``memfd``). Workers get its file descriptors over a Unix socket. Over another connection, a
worker of the same user on the same machine opens the files under ``/proc``, and compares the file's random name.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import struct
import threading
from collections.abc import Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from wsync.checksum import checksum_of, find_damage
from wsync.errors import WeightSyncError
from wsync.fast_path import FastUpdate
from wsync.loops import ArenaWriter, PackPlan, PeerWatch
from wsync.loops.words import BLOCK, NONE
from wsync.shm.memory import allocate, memory_file, raise_shortage, whole_pages
from wsync.weights.clean_thread import in_clean_thread
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer

PREPARE = struct.Struct("<QI")  # payload of a PREPARE message to a worker that uses the arena: transaction, slot
_MAX_SLOTS = 1024
_EXTRA_SPAN = 1 << 36  # bytes of (sparse) file between the extra states of two slots
EXTRA_END = _MAX_SLOTS * _EXTRA_SPAN
"""Where the extra states in file 2 end; registered buffers are described behind: see ``registered.py``."""


class Arena:
    """Either end's view of the shared slots.

    Args:
        workers: the number of workers.
        fds: the two memory files of an existing arena; None to make a new one.

    Attributes:
        fds: descriptors of file 1 (words and weights) and file 2 (extra state).
        words: the mapped words of file 1.
        writer: the sender's operations on the words.
        plans: by slot, the object that packs weights into it; only of slots that this end has mapped.
    """

    def __init__(self, workers: int, fds: tuple[int, int] | None = None) -> None:
        self.workers = workers
        self._name = f"wsync-{secrets.token_hex(16)}"
        self._slots_offset = whole_pages(workers * BLOCK + 2 * _MAX_SLOTS * 8)
        self._layout: Layout | None = None
        self._slot_size = 0
        self._mapping = threading.Lock()  # the acting thread and the receiver thread may need a slot at the same time
        self._buffers: list[Buffer] = []
        self.plans: list[PackPlan] = []
        self.fds = fds or self._create()
        control = mmap.mmap(self.fds[0], self._slots_offset)
        self.words = memoryview(control).cast("q")
        self._extra_sizes = workers * BLOCK // 8
        self._checksums = memoryview(control).cast("Q")[self._extra_sizes + _MAX_SLOTS :]
        self.writer = self._new_writer(0)
        if fds is None:
            self.writer.initialise()

    def _create(self) -> tuple[int, int]:
        words = memory_file(self._name, self._slots_offset)
        try:
            return words, memory_file("wsync-extra")
        except BaseException:
            os.close(words)
            raise

    def _new_writer(self, nbytes: int) -> ArenaWriter:
        return ArenaWriter(self.words, self.workers, BLOCK // 8, self._extra_sizes, nbytes)

    @property
    def handle(self) -> tuple[int, int, int, str]:
        """What another process of this machine needs to open the files: see ``open_handle``."""
        return os.getpid(), *self.fds, self._name

    @property
    def layout(self) -> Layout:
        """The layout of a slot."""
        assert self._layout is not None, "set_layout() comes first"
        return self._layout

    def set_layout(self, layout: Layout) -> None:
        """Define what a slot holds. Called once, at both ends, before any slot is used."""
        self._layout = layout
        self._slot_size = whole_pages(layout.nbytes)
        self.writer = self._new_writer(layout.nbytes)

    def first_word_of(self, worker: int) -> int:
        """Return the index of a worker's first word."""
        return worker * BLOCK // 8

    # --- slots: both ends ---

    @property
    def slots(self) -> int:
        """The number of slots that this end has mapped."""
        return len(self._buffers)

    def buffer(self, slot: int) -> Buffer:
        """Return the tensors of a slot, shared by all callers at this end; the first call maps the slot.

        The slot is mapped again if PyTorch has moved its tensors: a worker may have shared its model, which is bound to
        the slot, with another process.
        """
        if slot >= len(self._buffers) or self._buffers[slot].moved:
            with self._mapping:
                while slot >= len(self._buffers):
                    self._keep(len(self._buffers))
                if self._buffers[slot].moved:
                    self._keep(slot)
        return self._buffers[slot]

    def _keep(self, slot: int) -> None:
        buffer = self.map_slot(slot)
        # slice assignment, so that repeating it after an interrupt does not duplicate the entry
        self.plans[slot : slot + 1] = [buffer.plan]
        self._buffers[slot : slot + 1] = [buffer]

    def map_slot(self, slot: int) -> Buffer:
        """Return a new mapping of a slot, for this caller only, unlike ``buffer``.

        It is made in a thread without PyTorch modes: tensors keep the modes (such as inference mode) of the thread that
        makes them, and must not depend on the caller's.
        """
        return in_clean_thread(self._map, slot)

    def _map(self, slot: int) -> Buffer:
        offset, flags = self._slots_offset + slot * self._slot_size, mmap.MAP_SHARED | mmap.MAP_POPULATE
        memory = mmap.mmap(self.fds[0], self._slot_size, flags=flags, offset=offset)
        flat = torch.frombuffer(memory, dtype=torch.uint8)[: self.layout.nbytes]
        return Buffer.over(self.layout, flat, slot, shared=True)

    def views(self, slot: int) -> Sequence[Tensor]:
        """Return the tensors of a slot, in the layout's order."""
        return self.buffer(slot).views

    def read_extra(self, slot: int) -> bytes:
        """Return a slot's extra state."""
        size = self.words[self._extra_sizes + slot]
        return os.pread(self.fds[1], size, slot * _EXTRA_SPAN) if size else b""

    def close(self) -> None:
        """Close the files. Idempotent. The memory is freed when its last descriptor and mapping are closed."""
        fds, self.fds = self.fds, (NONE, NONE)
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    # --- slots: the sender ---

    def grow(self) -> int:
        """Add a slot; return its index.

        Raises:
            WeightSyncError: the machine has no memory left for it.
        """
        slot = len(self._buffers)
        if slot == _MAX_SLOTS:
            raise WeightSyncError(f"more than {_MAX_SLOTS} versions are in use at the same time")
        allocate(self.fds[0], self._slots_offset + slot * self._slot_size, self._slot_size)
        self.buffer(slot)
        return slot

    def free_slot(self, busy: Collection[int]) -> int | None:
        """Return the first slot not in ``busy``; None if there is none."""
        for slot in range(len(self._buffers)):
            if slot not in busy:
                return slot
        return None

    def published_slots(self) -> list[int]:
        """Return the slots that published words name, without duplicates."""
        words = [self.writer.published(worker) for worker in range(self.workers)]
        return sorted({slot for version, slot in words if version})

    def fast_update(self, descriptors: bytes, retains: bool, acknowledge: bool) -> FastUpdate | None:
        """Return the one-call update to all workers: see ``fast_path.py``.

        Args:
            descriptors: the workers' sockets, then their pidfds: an ``array("i")``, as bytes.
            retains: whether the workers' models stay bound to slots.
            acknowledge: whether to wait for acknowledgements.
        """
        try:
            watch = None if acknowledge else PeerWatch(descriptors)
        # out of file descriptors, or a worker is gone: fall back to the general path, which reports it by name
        except OSError:
            return None
        return partial(self.writer.update, self.plans, descriptors, retains, watch)

    def write_extra(self, slot: int, blob: bytes) -> None:
        """Store a slot's extra state.

        Raises:
            WeightSyncError: the machine has no memory left for it.
        """
        if blob:
            try:
                written = os.pwrite(self.fds[1], blob, slot * _EXTRA_SPAN)
                if written < len(blob):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                raise_shortage(error, len(blob))
        self.words[self._extra_sizes + slot] = len(blob)

    def write_checksum(self, slot: int, extra: bytes) -> None:
        """Store the checksum of what was packed into a slot."""
        self._checksums[slot] = checksum_of(self.buffer(slot).flat, extra)

    # --- slots: the worker ---

    def map_all(self) -> None:
        """Map all slots that exist, before the first update: mapping takes longer than an update."""
        slots = (os.fstat(self.fds[0]).st_size - self._slots_offset) // self._slot_size
        if slots:
            self.buffer(slots - 1)

    def find_damage(self, version: int, slot: int, extra: bytes) -> str:
        """Compare a slot with its checksum; return a description of the damage, empty if there is none."""
        return find_damage(version, self.buffer(slot).flat, extra, self._checksums[slot])


def open_handle(handle: tuple[int, int, int, str]) -> tuple[int, int] | None:
    """Open the files of an arena that another process made; return their descriptors, or None if that is impossible.

    It is impossible on another machine, for another user, and if the process has ended or is not visible here.
    """
    pid, words, extra, name = handle
    fds: list[int] = []
    try:
        for fd in (words, extra):
            fds.append(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
        if os.readlink(f"/proc/self/fd/{fds[0]}") == f"/memfd:{name} (deleted)":
            return fds[0], fds[1]
    except OSError:  # no such process, or another user's: the weights then arrive through the transport
        pass
    for fd in fds:
        os.close(fd)
    return None
