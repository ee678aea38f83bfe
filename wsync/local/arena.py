"""Slots of shared memory for one model's weights, and the words that say who uses which.

**What a published update promises.** For each worker the arena has a *switch* (one word: version and slot), the slot
that the worker's running forward uses, and a mutex around both. The sender stores the switch inside the mutex. A
worker, on its way into a forward, reads the switch and stores the slot in use, inside the same mutex. So:

1. *Every forward that starts after a publish uses that version or a newer one.* It reads the switch under the mutex,
   after the sender's critical section; the mutex orders the payload before the switch.
2. *No slot is written while a forward uses it.* The sender writes slot ``s`` only if no switch names it and no worker
   uses it. It looks after it has stored, in each worker's mutex, a switch that names another slot. A forward that is on
   ``s`` read the switch before that store, hence in an earlier critical section, in which it also recorded ``s``; the
   sender sees the record, or the later one that says that the forward has ended. A forward that starts afterwards
   cannot come upon ``s``, because no switch names it.
3. *Three slots suffice* as long as all workers have one version: one published, one that is still in use, one free.
   If two are still in use the sender waits for a forward to end, or its worker to die. Where workers have different
   versions (``worker_ids``, per-worker weights), or hold a slot to fall back on, the arena grows by as many slots.

An update that may be refused (a checksum, a module's extra state) leaves the model on the slot that it is bound to. So
such a worker holds that slot between forwards as well: nothing else would keep the sender from writing it.

A worker that only copies weights out (``retains=False``) needs a slot only from the publish until it has copied.

The memory is anonymous (``memfd``), allocated before it is touched, and gone with its last user.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from wsync import native
from wsync.errors import WeightSyncError
from wsync.local import mutex
from wsync.local.switch import BLOCK, NONE, Switch
from wsync.memory import allocate, explain, memory_file, whole_pages
from wsync.sending.fast_path import FastUpdate
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer
from wsync.weights.plainly import plainly
from wsync.wire.checksum import checksum_of, damage

_SLOTS = 1024  # at the most
_EXTRA_SPAN = 1 << 36  # bytes of (sparse) file between the extra states of two slots


class Arena:
    """Either end's view of the shared slots.

    Args:
        layout: of the weights in a slot.
        workers: how many workers there can be.
        fds: the two memory files of an arena that somebody else made; None to make a new one.
    """

    def __init__(self, layout: Layout, workers: int, fds: tuple[int, int] | None = None) -> None:
        self._layout = layout
        self._span = whole_pages(layout.nbytes)
        self._base = whole_pages(workers * BLOCK + 2 * _SLOTS * 8)
        self._mapping = threading.Lock()  # an acting thread and the one that listens may want a slot at once
        self._buffers: list[Buffer] = []
        self.rooms: list[native.Room | None] = []  # of the slots that this end has mapped
        self.fds = fds or self._create()
        control = mmap.mmap(self.fds[0], self._base)
        self._words = memoryview(control).cast("q")
        address = ctypes.addressof(ctypes.c_char.from_buffer(control))
        self._extra_sizes = workers * BLOCK // 8
        self._checksums = memoryview(control).cast("Q")[self._extra_sizes + _SLOTS :]
        self._board = native.board(self._words, workers, BLOCK // 8, self._extra_sizes, layout.nbytes)
        self.switches = [Switch(self._words, address + at * 8, at) for at in range(0, workers * BLOCK // 8, BLOCK // 8)]
        if fds is None:
            for w in range(workers):
                mutex.initialise(address + w * BLOCK)
                self.switches[w].reset()

    def _create(self) -> tuple[int, int]:
        return memory_file("wsync-weights", self._base), memory_file("wsync-extra")

    @property
    def slots(self) -> int:
        """How many this end has mapped."""
        return len(self._buffers)

    def grow(self) -> int:
        """Add a slot; its index.

        Raises:
            WeightSyncError: the machine has no memory left for it.
        """
        slot = len(self._buffers)
        if slot == _SLOTS:
            raise WeightSyncError(f"more than {_SLOTS} versions are in use at the same time")
        allocate(self.fds[0], self._base + slot * self._span, self._span)
        self.buffer(slot)
        return slot

    def buffer(self, slot: int) -> Buffer:
        """A slot, to be packed into or read from; mapped when first asked for, by whichever thread.

        And once more where it was moved: a worker may have shared its model, which was bound to it, with a process of
        its own. What it shared stays as it was.
        """
        if slot >= len(self._buffers) or self._buffers[slot].moved:
            with self._mapping:
                while slot >= len(self._buffers):
                    self._keep(len(self._buffers))
                if self._buffers[slot].moved:
                    self._keep(slot)
        return self._buffers[slot]

    def map_all(self) -> None:
        """Map the slots that there are, which takes longer than an update."""
        slots = (os.fstat(self.fds[0]).st_size - self._base) // self._span
        if slots:
            self.buffer(slots - 1)

    def _keep(self, slot: int) -> None:
        buffer = self.mapped(slot)
        self.rooms[slot : slot + 1] = [buffer.room]  # not appended: a signal may have struck between the two
        self._buffers[slot : slot + 1] = [buffer]

    def mapped(self, slot: int) -> Buffer:
        """A slot, in tensors that nobody else has."""
        return plainly(self._map, slot)

    def _map(self, slot: int) -> Buffer:
        offset, flags = self._base + slot * self._span, mmap.MAP_SHARED | mmap.MAP_POPULATE
        memory = mmap.mmap(self.fds[0], self._span, flags=flags, offset=offset)
        flat = torch.frombuffer(memory, dtype=torch.uint8)[: self._layout.nbytes]
        return Buffer.over(self._layout, flat, slot, shared=True)

    def views(self, slot: int) -> Sequence[Tensor]:
        """The tensors of a slot, in the layout's order."""
        return self.buffer(slot).views

    def occupied(self, again: Collection[int]) -> tuple[set[int], set[int], set[int]]:
        """Slots that workers may yet begin to use, that a forward uses, and that are held to fall back on.

        Args:
            again: workers who may begin to use a slot that they have taken once more, or whose successors may.
        """
        needed = [switch.needed(worker in again) for worker, switch in enumerate(self.switches)]
        named, used, held = ({*slots} - {NONE} for slots in zip(*needed, strict=True))
        return named, used, held

    def free_slot(self, busy: Collection[int]) -> int | None:
        """The first slot not in ``busy``: small indices again and again, so that caches stay warm."""
        for slot in range(len(self._buffers)):
            if slot not in busy:
                return slot
        return None

    def update(self, descriptors: bytes, retains: bool, acknowledge: bool) -> FastUpdate | None:
        """The fast path of updates to all workers, if there is one: see ``fast_path.py``.

        Args:
            descriptors: of the workers' lines, then of their processes: an ``array("i")``, as bytes.
            retains: whether workers stay bound to slots.
            acknowledge: whether to wait for answers.
        """
        if self._board is None:
            return None
        try:
            watch = None if acknowledge else native.watch(descriptors)
        except OSError:  # no descriptor is left for it, or somebody has gone: the slow path needs none, and says who
            return None
        return partial(self._board.update, self.rooms, descriptors, retains, watch)

    def write_extra(self, slot: int, blob: bytes) -> None:
        """Store a slot's extra state.

        Raises:
            WeightSyncError: the machine has no memory left for it.
        """
        if blob:
            try:
                written = os.pwrite(self.fds[1], blob, slot * _EXTRA_SPAN)
                if written < len(blob):  # as much as there was room for
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                explain(error, len(blob))
        self._words[self._extra_sizes + slot] = len(blob)

    def read_extra(self, slot: int) -> bytes:
        """A slot's extra state."""
        size = self._words[self._extra_sizes + slot]
        return os.pread(self.fds[1], size, slot * _EXTRA_SPAN) if size else b""

    def seal(self, slot: int, extra: bytes) -> None:
        """Store the checksum of what was packed into a slot."""
        self._checksums[slot] = checksum_of(self.buffer(slot).flat, extra)

    def damage(self, version: int, slot: int, extra: bytes) -> str:
        """What is wrong with the version in a slot that was sealed; empty if nothing."""
        return damage(version, self.buffer(slot).flat, extra, self._checksums[slot])

    def close(self) -> None:
        """Close the descriptors; the memory goes when the last view does."""
        for fd in self.fds:
            os.close(fd)
        self.fds = (NONE, NONE)
