"""Slots of shared memory for one model's weights, and the words that record which worker uses which slot.

A *word* is an integer of 8 bytes. The arena has two files, the second for what accompanies the weights::

    file 1   one block per connection   words
             one record per slot        words: version, size of the header, whether it has extra state, serial
             slots                      one version of the packed weights each
    file 2   one header per slot        every _SPAN bytes, sparse: extra state, and what the version requires

A block belongs to one connection until the worker's process is gone: what a worker that was disconnected may read stays
as it is until then. The trainer writes its first three words:

- ``published``: the version and slot that forwards have to use, and whether the worker has to signal the install;
- ``pending``: the same for a version that is decided, and about to be published (see below); 0 for none;
- ``wants_freed``: whether the worker has to signal when it ceases to use a slot.

The worker writes the others:

- ``used``: the slot that the running forward uses, or from which a worker copies; -1 between forwards;
- ``used_too``: the slot of a pending version while the receiver decides which of the two it uses; else -1;
- ``held``: a slot that the model needs between forwards as well (see below), or -1;
- ``installed``: the newest version that is installed; before it, what that has cost: ``wait`` and ``apply``, seconds;
- ``wants_wakeup``: whether the trainer has to wake it for updates that it does not await.

To *signal* is to add to an eventfd of the trainer; to wake a worker, to one of its connection. All words are loaded and
stored in one order that every process sees (sequentially consistent atomics, in ``csrc``).

**How a slot is taken and reserved.** There is no lock: ``used`` is a hazard pointer, and so is ``used_too``.

- A worker that enters a forward loads ``published``, stores its slot in ``used``, and loads ``published`` again. If it
  has changed, it begins anew.
- The trainer writes a slot ``s`` only after it has found that ``s`` is not leased (only the arena refers to its
  ``Buffer``), that no block names ``s`` in ``published`` or ``pending``, then none in ``used`` or ``used_too``, then
  none in ``held``.

**Guarantees.**

1. *Every forward that starts after a publish uses that version or a newer one*: its first load comes after the store,
   and the weights were packed before the store.
2. *No slot is written while a forward uses it.* Assume that a forward uses ``s``, named by the published word ``w``.
   It stored ``used = s`` before its second load. That load found ``w``, so it came before the store that replaced ``w``
   (a version is never published twice to a block). The trainer looks at ``used`` only after that store: it finds ``s``
   as long as the forward runs. The same holds for ``pending``, which is cleared only once ``published`` names its slot,
   and for a forward that begins with the version that its model has: it makes the same second load.
3. *A published slot is whole.* No slot is written while a published word names it.
4. *Three slots are enough* while all workers are sent the same versions: one published, one older one still in use, one
   free. If forwards use two older ones, ``reserve`` waits for one to end, or for its process to be gone. It sets
   ``wants_freed`` before it looks at ``used`` again, and a worker clears ``used`` before it looks at ``wants_freed``:
   one of them sees the other. The arena grows by one slot for each further version that is published to some workers,
   held by a model, or leased.

**How long a slot is used** depends on how a model takes the weights. A model that *copies* uses it until its bytes are
copied. A model that is *bound* (its parameters point into the slot) uses it during forwards only: between them the
trainer may overwrite the slot once it has published a newer version, to which the next forward binds. It *holds* the
slot between forwards as well if an install may fail (extra state, tied tensors), or once a transaction was prepared:
then the model can stay on it although a newer version is published. ``held`` is stored before ``used`` is cleared, and
loaded after ``used``, so the slot is found in one of them. If a model that holds nothing has changed its structure, it
may be bound to a slot that is written: its receiver refuses forwards until a version is installed.

**Several models.** A transaction stores ``pending`` for all models, and then ``published`` for all. So a forward that
finds one model's new version, which requires those of the others, finds the others' at least in ``pending``. The serial
number in a record stands for the requirements: if it is one that was met before, they are met now.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import msgspec
import torch

from wsync.deadlines import remaining
from wsync.errors import SyncTimeout, WeightSyncError, join_indices, system_call
from wsync.gate import process_gate
from wsync.native import native
from wsync.update import Inbox, Update
from wsync.weights.layout import Buffer, Layout
from wsync.weights.tensors import PinnedMapping, in_clean_thread

_BLOCK, _RECORD = 16, 4  # words
_PUBLISHED, _USED, _INSTALLED, _WAIT, _APPLY = 0, 8, 11, 13, 14  # in a block
_HEADER_SIZE, _HAS_EXTRA, _SERIAL = 1, 2, 3  # in a record
_SPAN = 1 << 36  # bytes of (sparse) file between two headers
# Bytes to allocate in one call. When a signal comes, the kernel may undo the call and it is repeated: with a periodic
# signal (a profiler's), a call that takes longer than the period would never finish.
_STEP = 1 << 20
_SPARE = 2  # slots besides those that are published, held and leased: one to write, one that may still be in use
_Header = tuple[dict[str, int], bytes]  # what an update requires, and its extra state


class _Slots:
    """One process's mapping of an arena: its two files, the words, and the slots that are mapped here."""

    def __init__(self, fds: tuple[int, int], capacity: int) -> None:
        self.fds = fds
        self.layout: Layout | None = None
        self.buffers: list[Buffer] = []  # of the slots that are mapped here
        self.plans: list[Any] = []  # of each
        self._slots_at = _size_of_words(capacity)
        self.control = mmap.mmap(fds[0], self._slots_at)
        self.words = memoryview(self.control).cast("q")
        self.numbers = memoryview(self.control).cast("d")
        self._records_at = capacity * _BLOCK
        self._mapping = threading.Lock()  # guards both lists: in a worker, two threads may map a slot at the same time

    def record(self, slot: int) -> int:
        """Return the index of the first word of a slot's record."""
        return self._records_at + slot * _RECORD

    @property
    def _slot_size(self) -> int:
        assert self.layout is not None, "set_layout() comes first"
        return _whole_pages(self.layout.nbytes)

    def buffer(self, slot: int) -> Buffer:
        """Return the buffer of a slot. The first call maps it, and those before it.

        It is mapped again if PyTorch has moved its tensors, because a model that is bound to them was shared.
        """
        if slot >= len(self.buffers) or not self.plans[slot].in_place:
            with self._mapping:
                while slot >= len(self.buffers) or not self.plans[slot].in_place:
                    at = min(slot, len(self.buffers))
                    buffer = in_clean_thread(self._map, at)
                    self.buffers[at : at + 1], self.plans[at : at + 1] = [buffer], [buffer.plan]
        return self.buffers[slot]

    def _map(self, slot: int) -> Buffer:
        assert self.layout is not None and self.fds[0] >= 0, "no layout, or closed"
        offset, flags = self._slots_at + slot * self._slot_size, mmap.MAP_SHARED | mmap.MAP_POPULATE
        memory = PinnedMapping(self.fds[0], self._slot_size, flags=flags, offset=offset)
        memory.pin()  # for copies to and from a GPU, if this process uses one
        flat = torch.frombuffer(memory, dtype=torch.uint8)[: self.layout.nbytes]
        return Buffer.over(self.layout, flat, slot)

    def allocate(self, slot: int) -> None:
        """Allocate the memory of a slot at the end of the file."""
        _allocate(self.fds[0], self._slots_at + slot * self._slot_size, self._slot_size)

    def allocated(self) -> int:
        """Return the number of slots that exist."""
        return (os.fstat(self.fds[0]).st_size - self._slots_at) // self._slot_size

    def close(self) -> None:
        """Close the files; mappings stay, and keep the memory. Idempotent."""
        fds, self.fds = self.fds, (-1, -1)
        for fd in fds:
            if fd >= 0:
                os.close(fd)


# --- memory ---


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _size_of_words(capacity: int) -> int:
    """Return the bytes of the blocks and records of an arena."""
    return _whole_pages(capacity * native.BLOCK_SIZE + native.RECORDS_SIZE)


def _allocate(descriptor: int, offset: int, size: int) -> None:
    """Allocate bytes at the end of a file: if memory ran out at the first use of a page, SIGBUS would end the process.

    WeightSyncError: no memory is left, and the file has the size that it had.
    """
    end, before = offset + size, os.fstat(descriptor).st_size
    try:
        with system_call("fallocate(2)", f"{size / 2**20:.1f} MiB of weights"):
            for at in range(offset, end, _STEP):
                os.posix_fallocate(descriptor, at, min(_STEP, end - at))
    except BaseException:
        os.ftruncate(descriptor, before)
        raise


# --- the two ends ---


class SenderArena:
    """The arena in the trainer, which makes it; WeightSyncError: no memory is left.

    The thread with the sender's lock calls ``set_layout``, ``reserve``, ``store_header``, ``publish``, ``set_pending``
    and ``wait``. The control thread calls ``store_header`` and ``publish`` as well, with the outlet's lock, to give a
    worker that has just connected the newest update. The others are for any thread. ``blocks``: the most connections at
    a time, those of disconnected but living workers included.
    """

    def __init__(self, blocks: int) -> None:
        with ExitStack() as opened:

            def keep(descriptor: int) -> int:
                opened.callback(os.close, descriptor)
                return descriptor

            with system_call("memfd_create(2)", "shared memory"):
                words = keep(os.memfd_create("wsync-weights", os.MFD_CLOEXEC))
                headers = keep(os.memfd_create("wsync-headers", os.MFD_CLOEXEC))
            _allocate(words, 0, _size_of_words(blocks))
            with system_call("eventfd(2)", "shared memory"):
                self.signal = keep(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))  # what workers signal
            self.blocks = blocks
            self._slots = _Slots((words, headers), blocks)
            with system_call("epoll_create(2)", "shared memory"):
                self._words = native.SenderWords(self._slots.control, blocks, self.signal)
            # (blocks, version, slot, acknowledge): points connections to a slot, and wakes workers that have to answer
            # or want to be woken; False: the process of one has ended, which is looked at only without `acknowledge`.
            self.publish: Callable[[tuple[int, ...], int, int, bool], bool] = self._words.publish
            # (blocks, version, timeout): waits until all have installed a version. False: at the deadline; or if one
            # without it was closed, or needs `attention`. Raises what a signal handler raises.
            self.wait: Callable[[tuple[int, ...], int, float | None], bool] = self._words.wait
            # Ends the wait for a block, or the next one: its session has ended, or has refused an update.
            self.attention: Callable[[int], None] = self._words.attention
            opened.pop_all()
        self._workers: dict[int, int] = {}  # by block, of those that are open

    @property
    def fds(self) -> tuple[int, int]:
        """The two files, for the workers."""
        return self._slots.fds

    def set_layout(self, layout: Layout) -> None:
        """Define what a slot contains. Called once, before any ``reserve``."""
        self._slots.layout = layout

    def reserve(self, deadline: float | None) -> Buffer:
        """Return the buffer of a slot that no process reads. The slot is leased until the last reference is dropped.

        SyncTimeout: there was none before ``deadline``; names the workers whose forwards use them. WeightSyncError: no
        memory is left for a further slot; nothing has changed.
        """
        if (found := self._claim()) is None:
            self._words.want_freed(True)
            try:
                while (found := self._claim()) is None:
                    if not self._words.wait((), 0, remaining(deadline)):  # until a worker has freed a slot
                        raise self._too_long()
            finally:
                self._words.want_freed(False)
        return found if found.plan.in_place else self._slots.buffer(found.slot)

    def _claim(self) -> Buffer | None:
        """Return a free buffer, a new one if most others are kept; None: one has to be waited for."""
        found = self._words.claim(self._slots.buffers)
        if isinstance(found, Buffer):
            return found
        kept: int = found  # leased, published or held
        number = len(self._slots.buffers)
        if number >= kept + _SPARE:
            return None
        if number == native.MAX_SLOTS:
            raise WeightSyncError(f"more than {native.MAX_SLOTS} versions are in use at the same time")
        self._slots.allocate(number)
        return self._slots.buffer(number)

    def _too_long(self) -> SyncTimeout:
        blocking = {w for block, w in tuple(self._workers.items()) if self._slots.words[block * _BLOCK + _USED] >= 0}
        return SyncTimeout(
            f"no slot came free in time: worker(s) {join_indices(blocking)} are still inside a forward, or stopped",
            dict.fromkeys(blocking, "holds its weights in a forward that does not end"),
        )

    def open_block(self, wake_fd: int, pidfd: int, worker: int) -> int:
        """Give a new connection a block; return its index. IndexError: all blocks are in use.

        ``wake_fd`` is an eventfd, by which the worker is woken, and ``pidfd`` is of its process: both are duplicated.
        """
        block = self._words.open(wake_fd, pidfd)
        self._workers[block] = worker
        return block

    def close_block(self, block: int) -> None:
        """Free a block. Called when its process is gone, never before. Idempotent."""
        if self._workers.pop(block, None) is not None:
            self._words.close(block)

    def store_header(self, update: Update, serial: int) -> None:
        """Store what accompanies an update, before it is published. Needed only if it has anything beside its weights.

        ``serial`` stands for ``update.requires``: the next number whenever that has changed; 0 if it is empty.
        WeightSyncError: no memory is left.
        """
        slot, record, words = update.buffer.slot, self._slots.record(update.buffer.slot), self._slots.words
        if update.extra or update.requires:
            header = msgspec.msgpack.encode((dict(update.requires), update.extra))
            with system_call("pwrite(2)", f"{len(header) / 2**20:.1f} MiB of extra state"):
                if os.pwrite(self._slots.fds[1], header, slot * _SPAN) < len(header):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            words[record + _HEADER_SIZE] = len(header)
        words[record + _HAS_EXTRA], words[record + _SERIAL] = bool(update.extra), serial

    def set_pending(self, blocks: tuple[int, ...], version: int, slot: int) -> None:
        """Store what ``publish`` is about to publish, in a transaction: for all models before the first ``publish``."""
        self._words.publish(blocks, version, slot, True, True)

    def installed(self, block: int) -> int:
        """Return the newest version that a worker has installed."""
        return self._slots.words[block * _BLOCK + _INSTALLED]

    def times(self, blocks: Iterable[int]) -> list[tuple[float, float]]:
        """Return each worker's seconds of waiting and of installing, of its newest version."""
        numbers = self._slots.numbers
        return [(numbers[block * _BLOCK + _WAIT], numbers[block * _BLOCK + _APPLY]) for block in blocks]

    def close(self) -> None:
        """Close all descriptors; memory that is bound stays. Idempotent."""
        self.signal = -1
        self._words.shut()
        self._slots.close()


class ArenaInbox(Inbox):
    """The arena in a worker.

    ``fds``, the two files, the trainer's eventfd and this connection's, are owned by this object from now on.
    ``binds``: whether the model stays bound to its slot; otherwise it copies. ``wake`` is readable when an update has
    come that the trainer, or a thread of this process, waits for.
    """

    refuse: Callable[[Update, str], None]  # called with an update that could not be installed; set by the connection

    def __init__(self, fds: Sequence[int], block: int, blocks: int, owner: Any, *, binds: bool) -> None:
        weights, headers, self._signal, self.wake = fds
        self.binds = binds
        self._slots = _Slots((weights, headers), blocks)
        self._block, self._owner = block, owner
        self._target: Any = None
        self._may_refuse = False
        self._waited_for = False
        # Compiled code, which installs what is usual, and calls the receiver for the rest.
        self.words = native.WorkerWords(self._slots.control, blocks, block, self._signal, binds, self._slots.plans)
        self.words.receiver = owner

    def use(self, layout: Layout, target: Any) -> None:
        """Map all slots that exist: mapping takes longer than an update."""
        self._slots.layout, self._target = layout, target
        slots = self._slots.allocated()
        if slots:
            self._slots.buffer(slots - 1)
        if target.may_refuse or self._owner.on_request:  # the model's slot is kept between forwards, too
            self.words.hold, self._may_refuse = self.binds, True

    def _set_usual(self) -> None:
        """Let the hook install usual updates: without extra state or new requirements, and none that may be refused.

        The receiver installs all while threads wait for them, or if the worker fetches or passes on.
        """
        owner = self._owner
        usual = not (self._waited_for or self._may_refuse or owner.on_request or owner.pass_on)
        self.words.usual(getattr(self._target, "installer", None) if usual else None)

    @property
    def newest(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The version that the trainer has published for this worker; 0 for none."""
        return self._slots.words[self._block * _BLOCK + _PUBLISHED] >> 16

    def poll(self) -> Sequence[Update]:
        """Return the published and the pending version, if they are new here; their slots are marked as used."""
        # Nothing outside the gate: a forward may be running, and its slot has to stay marked.
        if self._slots.layout is None or not process_gate().held_here:
            return ()
        return [self.update_in(*taken) for taken in self.words.take() if taken[0]]

    def update_in(self, version: int, slot: int, acknowledge: bool = True) -> Update:
        """Return the update in a slot that is marked as used here, or prepared by the trainer.

        From a prepared one on, the model holds its slot: what is published may have to wait until the model's siblings
        have what it requires.
        """
        self.words.hold = self.words.hold or (self.binds and version > self.newest)
        record, words = self._slots.record(slot), self._slots.words
        size = words[record + _HEADER_SIZE]
        requires, extra = {}, b""
        if size:
            requires, extra = msgspec.msgpack.decode(os.pread(self._slots.fds[1], size, slot * _SPAN), type=_Header)
        return Update(version, self._slots.buffer(slot), extra, 0, requires, acknowledge=bool(acknowledge))

    def settled(self, update: Update, error: str) -> None:
        words = self.words
        if error:
            words.failed_version = max(words.failed_version, update.version)
            words.usual(None)  # the receiver must see the next install, to allow forwards again
        else:
            slot = update.buffer.slot
            words.fulfilled = self._slots.words[self._slots.record(slot) + _SERIAL]
            words.version, words.announced_at = update.version, 0.0
            if self.binds:
                words.bound_slot = slot
            self._set_usual()
        if not self.binds:
            words.release()

    def answer(self, update: Update, error: str, wait: float, apply: float) -> None:
        if error:
            self.refuse(update, error)
        else:
            self.words.answer(update.version, update.acknowledge, wait, apply)

    def leave(self) -> None:
        self.words.release()

    def woken(self) -> None:
        """The control thread was woken: note when, for the cost, and install."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.wake)
        if self.newest > max(self.words.version, self.words.failed_version):
            self.words.announced_at = time.perf_counter()
        self._owner.settle()
        self._owner.announced_at = 0.0  # the words have it

    def set_wakeups(self, wanted: bool) -> None:
        self._waited_for = wanted
        self.words.set_wakeups(wanted)
        process_gate().soon(self._set_usual)

    def release(self) -> None:
        self.words.bound_slot = -1
        self.words.release()

    def close(self) -> None:
        """Release everything. Called when the model has memory of its own (``Receiver.copy_to_own_memory``)."""
        self.words.close()
        self._slots.close()
        descriptors, self._signal, self.wake = {self._signal, self.wake} - {-1}, -1, -1
        for descriptor in descriptors:
            os.close(descriptor)
