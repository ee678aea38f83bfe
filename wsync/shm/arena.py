"""Slots of shared memory for one model's weights, and the words that record which worker uses which slot.

A *word* is a control field of 8 bytes. The arena has two files, the second for the extra state of modules
(``get_extra_state``)::

    file 1   one block per worker   a mutex and the worker's words
             one record per slot    among other words, the version in the slot
             slots                  from _slots_offset on; _slot_size bytes each: one version of the packed weights
    file 2   extra state per slot   every _EXTRA_SPAN bytes; sparse
             registered weights     where they lie (see ``shm/registered.py``); from EXTRA_END on

``loops/words.py`` describes all words.

**Guarantees.** The sender locks a worker's mutex to store its published word (version and slot). A worker that starts a
forward locks it to read the published word and to record the slot as used. Therefore:

1. *Every forward that starts after a publish uses that version or a newer one.* It locks the mutex after the sender has
   unlocked it, so it reads the new word. The mutex also ensures that it reads the weights that were packed before.
2. *No slot is written while a forward uses it* (but see "Without protection"). The sender writes a slot ``s`` only when
   it has read, first, that no published word names ``s`` (newer updates have replaced it) and, second, that no worker
   has recorded ``s`` as used or held. If a forward read its published word before the sender replaced it, the
   forward recorded ``s`` under the same lock, so the second step finds the record as long as the forward runs. A later
   forward reads another slot. (The second step is done without the mutex: ``WorkerSlot.take`` explains why it misses no
   record.)
3. *A published slot is whole.* No slot is written while a published word names it, not even once the worker has copied
   it: a replacement of that worker would still read it.
4. *Three slots are enough* while all workers are sent the same versions: one published, one older one still in use, one
   free. If forwards use two older ones, the arena does not grow: the sender waits for a forward to end, or for its
   worker to die. The arena grows by one slot for each further version that is published to some workers
   (``worker_ids``, weights per worker), held by a model (see below), prepared in a transaction, or still being sent by
   a transport.

How long a worker uses a slot depends on how its model takes the weights:

- *Bound* (its parameters point into the slot), the usual case: only during forwards. Between forwards the sender may
  overwrite the slot once it has published a newer one: the next forward binds to that.
- *Bound, and holding the slot*, if an install may fail (checksum, extra state), or with ``initiator="receiver"``:
  between forwards as well, until the next version is installed.
- *Copying*: only until the weights are copied out, since the forwards use the copy. Two slots are then enough, or
  three with ``initiator="receiver"``.

**Without protection.** In two cases a forward may use a slot that the sender writes:

- *The worker was disconnected while it was alive.* From then on its words belong to its replacement. Before each store
  a worker compares, under the mutex, the number of the connection in its words with its own number; if they differ, it
  stores nothing. A worker that was stopped (SIGSTOP) between this comparison and its stores still holds the mutex, and
  finishes the stores when it is continued. They are harmless: the sender ignores the words of an index without a
  worker. Once there is a replacement, they may keep the sender from reusing the slots that they name, until the
  replacement's first forward, which has to wait for the mutex, overwrites them.
- *An install has failed because the worker changed the structure of its model, and the model does not hold its slot.*
  The model stays bound to the older slot. (Where an install may fail for other reasons, the slot is held: see above.)

The worker notices the first case at the beginning or the end of a forward, the second when the install fails. It then
copies its model to memory of its own, and reads the slot's version word. The sender sets that word to 0 before it
writes the slot, and a version is never used twice. So if the word still has the model's version, neither the copy nor
an earlier forward was mixed: the model keeps the copy. Otherwise this forward and each later one raise an error, until
a version is installed.

The memory is anonymous (``memfd``). Workers get its file descriptors over a Unix socket. Over another connection, a
worker of the same user on the same machine opens the files under ``/proc``, and checks their random name.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import threading
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from wsync.checksum import checksum_of, find_damage
from wsync.errors import WeightSyncError
from wsync.loops import ArenaWriter, PackPlan
from wsync.loops.words import (
    BLOCK,
    MAX_SLOTS,
    PUBLISHED,
    SLOT_CHECKSUM,
    SLOT_EXTRA_SIZE,
    SLOT_VERSION,
    record_at,
    version_in,
    words_of_arena,
)
from wsync.shm.memory import allocate, memory_file, whole_pages, write_at
from wsync.weights.clean_thread import in_clean_thread
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer
from wsync.weights.pinned import PinnedMapping

PREPARE_PAYLOAD = struct.Struct("<QI")  # of a PREPARE message to a worker that uses the arena: transaction, slot
_EXTRA_SPAN = 1 << 36  # bytes of (sparse) file between the extra states of two slots
EXTRA_END = MAX_SLOTS * _EXTRA_SPAN
"""Where the extra states in file 2 end; the description of registered weights follows, see ``registered.py``."""


class Arena:
    """One process's mapping of the slots. Base class of ``SenderArena`` and ``WorkerArena``.

    Args:
        num_workers: the number of workers.
        fds: the two memory files.

    Attributes:
        fds: descriptors of file 1 (words and weights) and file 2 (extra state).
        words: the mapped words of file 1.
        plans: one ``PackPlan`` (the addresses of the tensors) for each slot that is mapped in this process. The sender
            uses it to pack, the compiled fast path of a worker to install.
    """

    def __init__(self, num_workers: int, fds: tuple[int, int]) -> None:
        self.num_workers = num_workers
        self.fds = fds
        self.plans: list[PackPlan] = []
        self._slots_offset = whole_pages(words_of_arena(num_workers) * 8)
        self._layout: Layout | None = None
        self._slot_size = 0
        self._mapping_lock = threading.Lock()  # in a worker, two threads may map a slot at the same time
        self._buffers: list[Buffer] = []
        control = mmap.mmap(self.fds[0], self._slots_offset)
        self.words = memoryview(control).cast("q")
        self._unsigned_words = memoryview(control).cast("Q")

    @property
    def layout(self) -> Layout:
        """The layout of a slot."""
        assert self._layout is not None, "set_layout() comes first"
        return self._layout

    def set_layout(self, layout: Layout) -> None:
        """Define what a slot contains. Called by the sender and by each worker before any slot is used.

        The sender calls it again if there was no memory for the first slots.
        """
        self._buffers.clear()
        self.plans.clear()
        self._layout = layout
        self._slot_size = whole_pages(layout.nbytes)

    def buffer(self, slot: int) -> Buffer:
        """Return the ``Buffer`` of a slot, the same for all callers. The first call maps it, and those before it.

        The slot is mapped again if PyTorch has moved its tensors, as it does if the worker puts the model that is bound
        to them into shared memory (``share_memory()``).
        """
        if slot >= len(self._buffers) or self._buffers[slot].moved:
            with self._mapping_lock:
                while slot >= len(self._buffers) or self._buffers[slot].moved:
                    at = min(slot, len(self._buffers))
                    buffer = self.map_slot(at)
                    # slice assignment, so that repeating it after an interrupt does not duplicate the entry
                    self.plans[at : at + 1] = [buffer.plan]
                    self._buffers[at : at + 1] = [buffer]
        return self._buffers[slot]

    def map_slot(self, slot: int) -> Buffer:
        """Return a new mapping of a slot, for this caller only, unlike ``buffer``.

        It is made in a thread of its own: if the caller were in inference mode, say, tensors made in its thread would
        remain inference tensors.
        """
        return in_clean_thread(self._map, slot)

    def _map(self, slot: int) -> Buffer:
        assert self.fds[0] >= 0, "the arena is closed"  # else mmap would map new anonymous memory
        offset, flags = self._slots_offset + slot * self._slot_size, mmap.MAP_SHARED | mmap.MAP_POPULATE
        memory = PinnedMapping(self.fds[0], self._slot_size, flags=flags, offset=offset)
        memory.pin()  # page-locked for copies to and from a GPU, if this process uses one
        flat = torch.frombuffer(memory, dtype=torch.uint8)[: self.layout.nbytes]
        return Buffer.over(self.layout, flat, slot, shared=True)

    def views(self, slot: int) -> Sequence[Tensor]:
        """Return the tensors of a slot, in the layout's order."""
        return self.buffer(slot).views

    def read_extra(self, slot: int) -> bytes:
        """Return a slot's extra state."""
        size, extra = self.words[record_at(self.num_workers, slot) + SLOT_EXTRA_SIZE], bytearray()
        while len(extra) < size:  # Linux reads less than 2 GiB at once
            part = os.pread(self.fds[1], size - len(extra), slot * _EXTRA_SPAN + len(extra))
            if not part:
                raise ValueError(f"slot {slot} has {len(extra)} bytes of extra state, not {size}")
            extra += part
        return bytes(extra)

    def close(self) -> None:
        """Close the files; mappings stay, and keep the memory. Idempotent."""
        fds, self.fds = self.fds, (-1, -1)
        for fd in fds:
            if fd >= 0:
                os.close(fd)


class SenderArena(Arena):
    """The sender's arena, which it creates. Its workers open it.

    It is used with the channel's lock, except in two cases, in which the sender's lock is enough:

    - an update by the fast path, while no send-loop thread runs;
    - ``published_slots``, and reads of these slots, because no slot is written without the sender's lock.

    Args:
        num_workers: the number of workers.

    Attributes:
        writer: the operations on the words.
    """

    def __init__(self, num_workers: int) -> None:
        self._name = f"wsync-{secrets.token_hex(16)}"
        with ExitStack() as opened:
            words = memory_file(self._name, whole_pages(words_of_arena(num_workers) * 8))
            opened.callback(os.close, words)
            extra = memory_file(self._name)
            opened.callback(os.close, extra)
            super().__init__(num_workers, (words, extra))
            self.writer = ArenaWriter(self.words, num_workers)
            self.writer.initialise()
            opened.pop_all()  # ``close`` closes them

    def set_layout(self, layout: Layout) -> None:
        """See ``Arena``. Frees slots that were allocated after an earlier call, before memory ran out."""
        super().set_layout(layout)
        os.ftruncate(self.fds[0], self._slots_offset)

    @property
    def handle(self) -> tuple[int, int, int, str]:
        """Process id, descriptors and name, by which another process can open the files: see ``open_handle``."""
        return os.getpid(), *self.fds, self._name

    def grow(self) -> int:
        """Add a slot; return its index.

        Raises:
            WeightSyncError: the machine has no memory left for it.
        """
        slot = len(self._buffers)
        if slot == MAX_SLOTS:
            raise WeightSyncError(f"more than {MAX_SLOTS} versions are in use at the same time")
        allocate(self.fds[0], self._slots_offset + slot * self._slot_size, self._slot_size)
        self.buffer(slot)
        return slot

    def published_slots(self) -> list[int]:
        """Return the slots that published words name, without duplicates."""
        words = [self.writer.published(worker) for worker in range(self.num_workers)]
        return sorted({slot for version, slot in words if version})

    def write_extra(self, slot: int, blob: bytes) -> None:
        """Store a slot's extra state.

        Raises:
            WeightSyncError: the machine has no memory left for it.
        """
        write_at(self.fds[1], blob, slot * _EXTRA_SPAN)
        self.words[record_at(self.num_workers, slot) + SLOT_EXTRA_SIZE] = len(blob)

    def write_checksum(self, slot: int, extra: bytes) -> None:
        """Store the checksum of what was packed into a slot."""
        at = record_at(self.num_workers, slot) + SLOT_CHECKSUM
        self._unsigned_words[at] = checksum_of(self.buffer(slot).flat, extra)


class WorkerArena(Arena):
    """The arena in a worker. Used by the thread that connects, the acting thread (forwards) and the receiver thread.

    A ``WorkerSlot`` has the operations on the worker's words.
    """

    def map_all(self) -> None:
        """Map all slots that exist, before the first update: mapping takes longer than an update."""
        slots = (os.fstat(self.fds[0]).st_size - self._slots_offset) // self._slot_size
        if slots:
            self.buffer(slots - 1)

    def published_version(self, worker: int) -> int:
        """Return the version that a worker's published word names; 0 for none. Needs no lock: it reads one word."""
        return version_in(self.words[worker * BLOCK + PUBLISHED])

    def slot_version(self, slot: int) -> int:
        """Return the version in a slot; 0 from before the sender writes to it until it is published."""
        return self.words[record_at(self.num_workers, slot) + SLOT_VERSION]

    def find_damage(self, version: int, slot: int, extra: bytes) -> str:
        """Compare a slot with its checksum; return a description of the damage, empty if there is none."""
        checksum = self._unsigned_words[record_at(self.num_workers, slot) + SLOT_CHECKSUM]
        return find_damage(version, self.buffer(slot).flat, extra, checksum)
