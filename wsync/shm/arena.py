"""Slots of shared memory for one model's weights, and the words that record which worker uses which slot.

A *word* is a control field of 8 bytes. The arena has two files, the second for the extra state of modules
(``get_extra_state``)::

    file 1   one block per worker   BLOCK bytes: a mutex, then the worker's words
             one word per slot      the size of its extra state
             one word per slot      its checksum
             slots                  from _slots_offset on; _slot_size bytes each: one version of the packed weights
    file 2   one extra per slot     every _EXTRA_SPAN bytes; sparse

**Guarantees.** For each worker the arena has a *published word* (version and slot), a word for the slot that the
worker's running forward uses, and a mutex. The sender locks the mutex to store the published word. A worker that starts
a forward locks it to read the published word and to record the slot as used. Therefore:

1. *Every forward that starts after a publish uses that version or a newer one.* It locks the mutex after the sender has
   unlocked it, so it reads the new word. The mutex also ensures that it sees the weights that were packed before.
2. *No slot is written while a forward uses it.* The sender writes a slot ``s`` only after it has stored words that name
   other slots, and has then seen that no worker uses ``s``. A forward that uses ``s`` read the published word before it
   was replaced, and recorded ``s`` under the same lock. So the sender sees that record until the forward has ended. A
   forward that starts later cannot use ``s``, because no word names it.
3. *Three slots are enough* while all workers have one version: one published, one still in use, one free. If two are
   still in use, the sender waits for a forward to end, or for its worker to die. The arena grows by one slot for each
   further version in use: if workers were sent different versions (``worker_ids``, weights per worker), or keep an
   old one to roll back to.

How long a worker uses a slot depends on how its model takes the weights:

- *Bound* (its parameters point into the slot), the usual case: only during forwards. Between forwards the sender may
  overwrite the slot once it has published a newer one: the next forward binds to that.
- *Bound, and holding the slot*, where installing may fail (checksum, extra state) or ``initiator="receiver"``: between
  forwards as well, until the next version is installed.
- *Copying*: only until the weights are copied out. Afterwards the slot may be written although the worker's published
  word still names it. Points 2 and 3 do not apply.

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
    """One process's mapping of the shared slots. The sender creates the arena; each of its workers opens it.

    On the sender it is used under the channel's lock; in a worker by the acting thread (which runs the forwards) and
    the receiver thread.

    Args:
        workers: the number of workers.
        fds: the two memory files of an existing arena; None to create one.

    Attributes:
        fds: descriptors of file 1 (words and weights) and file 2 (extra state).
        words: the mapped words of file 1.
        writer: the sender's operations on the words; unused in a worker, which has a ``WorkerSlot``.
        plans: by slot, the object that packs weights into it; only of slots that are mapped here.
    """

    def __init__(self, workers: int, fds: tuple[int, int] | None = None) -> None:
        self.workers = workers
        self._name = f"wsync-{secrets.token_hex(16)}"
        self._slots_offset = whole_pages(workers * BLOCK + 2 * _MAX_SLOTS * 8)
        self._layout: Layout | None = None
        self._slot_size = 0
        self._mapping_lock = threading.Lock()  # the acting and the receiver thread may need a slot at the same time
        self._buffers: list[Buffer] = []
        self.plans: list[PackPlan] = []
        self.fds = fds or self._create()
        control = mmap.mmap(self.fds[0], self._slots_offset)
        self.words = memoryview(control).cast("q")
        self._first_extra_size = workers * BLOCK // 8  # index of the first word that has the size of an extra state
        self._checksums = memoryview(control).cast("Q")[self._first_extra_size + _MAX_SLOTS :]
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
        return ArenaWriter(self.words, self.workers, BLOCK // 8, self._first_extra_size, nbytes)

    @property
    def handle(self) -> tuple[int, int, int, str]:
        """Process id, descriptors and name, by which another process can open the files: see ``open_handle``."""
        return os.getpid(), *self.fds, self._name

    @property
    def layout(self) -> Layout:
        """The layout of a slot."""
        assert self._layout is not None, "set_layout() comes first"
        return self._layout

    def set_layout(self, layout: Layout) -> None:
        """Define what a slot contains. Called once by the sender and once by each worker, before any slot is used."""
        self._layout = layout
        self._slot_size = whole_pages(layout.nbytes)
        self.writer = self._new_writer(layout.nbytes)

    def first_word_of(self, worker: int) -> int:
        """Return the index of a worker's first word."""
        return worker * BLOCK // 8

    # --- slots: sender and worker ---

    @property
    def slots(self) -> int:
        """The number of slots that are mapped here."""
        return len(self._buffers)

    def buffer(self, slot: int) -> Buffer:
        """Return the tensors of a slot, the same for all callers; the first call maps the slot.

        The slot is mapped again if PyTorch has moved its tensors, as it does when a worker shares the model that is
        bound to them with another process.
        """
        if slot >= len(self._buffers) or self._buffers[slot].moved:
            with self._mapping_lock:
                while slot >= len(self._buffers):
                    self._map_and_record(len(self._buffers))
                if self._buffers[slot].moved:
                    self._map_and_record(slot)
        return self._buffers[slot]

    def _map_and_record(self, slot: int) -> None:
        buffer = self.map_slot(slot)
        # slice assignment, so that repeating it after an interrupt does not duplicate the entry
        self.plans[slot : slot + 1] = [buffer.plan]
        self._buffers[slot : slot + 1] = [buffer]

    def map_slot(self, slot: int) -> Buffer:
        """Return a new mapping of a slot, for this caller only, unlike ``buffer``.

        It is made in a thread of its own: if the caller were in inference mode, say, tensors made in its thread would
        remain inference tensors.
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
        size = self.words[self._first_extra_size + slot]
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

    def fast_update(self, descriptors: bytes, keep_published: bool, acknowledge: bool) -> FastUpdate | None:
        """Return the call that does a whole update of all workers (``fast_path.py``); None if a worker is gone.

        Args:
            descriptors: the workers' sockets, then their pidfds: the bytes of an ``array("i")``.
            keep_published: whether a slot counts as used while it is published: workers are bound to it, or may copy it
                at any time (``initiator="receiver"``). Otherwise it is used only while they copy.
            acknowledge: whether to wait for acknowledgements.
        """
        try:
            # Notices deaths; with acknowledgements, waiting for these notices deaths as well.
            watch = None if acknowledge else PeerWatch(descriptors)
        except OSError:  # a worker is gone, or this process can open no more files; a full send reports it
            return None
        return partial(self.writer.update, self.plans, descriptors, keep_published, watch)

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
        self.words[self._first_extra_size + slot] = len(blob)

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

    It is impossible on another machine, for another user, if the process has ended, or in another PID namespace.
    """
    pid, words, extra, name = handle
    fds: list[int] = []
    try:
        for fd in (words, extra):
            fds.append(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
        if os.readlink(f"/proc/self/fd/{fds[0]}") == f"/memfd:{name} (deleted)":
            return fds[0], fds[1]
    except OSError:  # no such process, or another user's
        pass
    for fd in fds:
        os.close(fd)
    return None
