"""The sender's part of an arena's words: pointing workers to slots, and finding slots that may be written.

``shm/arena.py`` explains why no slot is written while a forward uses it. ``WorkerSlot.take`` explains the order of the
loads and stores that are made without the mutex.
"""

from __future__ import annotations

import os
import select
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from wsync.errors import SyncTimeout, in_forked_child
from wsync.loops.messages import ACK, UPDATE, Message, send_message, take_message
from wsync.loops.pack_plan import PackPlan
from wsync.loops.peer_watch import PeerWatch
from wsync.loops.tensor_tree import TensorTree
from wsync.loops.words import (
    CONNECTION,
    HELD_SLOT,
    MAX_SLOTS,
    NONE,
    PUBLISHED,
    SLOT_EXTRA_SIZE,
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
from wsync.types import SyncReport, split_phases

MUTEX_TIMEOUT = 0.01  # seconds; if a worker was stopped while it has its mutex, the caller of update() handles it
_LONGEST = 2**31 - 1  # milliseconds that poll() takes

# Of a worker that is not connected. The mutex and PUBLISHED are not among them: both are for the next worker too.
_VACANT = {CONNECTION: 0, HELD_SLOT: NONE, USED_SLOT: NONE, WANTS_WAKEUPS: 1, WANTS_FREED: 0}

UpdateResult = SyncReport | tuple[SyncReport, int, list[int], bytes] | None


@dataclass(slots=True)
class _Update:
    """One update in progress.

    ``started`` is when it began, the attributes after it are when the phases of these names ended, on
    ``time.perf_counter``.
    """

    version: int
    acknowledge: bool
    descriptors: Sequence[int]
    slot: int
    answers: dict[int, Message]
    started: float = 0.0
    waited: float = 0.0
    extracted: float = 0.0
    packed: float = 0.0
    published: float = 0.0


class ArenaWriter:
    """Writes the words of one sender's arena. Used in the sender's process, by one thread at a time.

    That is the thread with the channel's lock; or, on the fast path, the thread with the sender's lock, while no
    send-loop thread runs.

    Args:
        words: of the arena.
        workers: the number of workers.
        nbytes: of one copy of the weights; for reports.

    Raises:
        ValueError: ``words`` are too few.
    """

    def __init__(self, words: memoryview, workers: int, nbytes: int, /) -> None:
        if workers < 0 or words_of_arena(workers) > len(words):
            raise ValueError("there are fewer words than workers need")
        self._words = words
        self._nbytes = nbytes
        self._creator = os.getpid()
        self._blocks = [Block(words, worker) for worker in range(workers)]

    def _require_creator(self) -> None:
        if os.getpid() != self._creator:
            raise in_forked_child()

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
        """Give a worker's words to a new connection. Called after ``vacate``, before the worker is told the number.

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
        """The three slots of one worker, or ``NONE``. The loads are in this order: see ``WorkerSlot.take``."""
        word = block[PUBLISHED]
        return slot_in(word) if version_in(word) else NONE, block[USED_SLOT], block[HELD_SLOT]

    def await_free(self, worker: int, timeout: float | None, /) -> bool:
        """Have a worker send a message when its forward ends; return False if it has no slot in use.

        Raises:
            SyncTimeout, NotConnected: as ``publish``.
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

    def update(
        self,
        plans: list[PackPlan],
        descriptors: bytes,
        watch: PeerWatch | None,
        tensors: TensorTree | list[Tensor],
        version: int,
        timeout: float | None,
        began: float,
        /,
    ) -> UpdateResult:
        """Do one update on the fast path: copy tensors into a free slot, point all workers to it, wait for answers.

        Args:
            plans: of the slots that are mapped here.
            descriptors: bytes of an ``array("i")``: of each worker's connection, then of each worker's process.
            watch: over ``descriptors``, to notice deaths and errors; None to wait for acknowledgements instead.
            tensors: in the order of the layout.
            version: the update's.
            timeout: seconds to wait for acknowledgements; None for no limit.
            began: when the call began, on ``time.perf_counter``.

        Returns:
            A report. If the update is published but not finished: the fields of an ``UnfinishedUpdate``. None, and
            nothing was done, if a worker is missing, no slot is free, or the tensors are not plain bytes that fit.

        Raises:
            NotConnected: this process is a forked child.
        """
        self._require_creator()
        numbers = array("i", descriptors)
        if len(numbers) != 2 * len(self._blocks):
            return None
        update = _Update(version, watch is None, numbers, NONE, {})
        if not self._pack(update, plans, tensors):
            return None
        others = self._publish_all(update)
        settled = not others and (self._await_answers(update, timeout) if watch is None else not watch.has_events())
        report = self._report(update, began, time.perf_counter())
        if settled:
            return report
        return report, update.slot, others, bytes(worker in update.answers for worker in range(len(self._blocks)))

    def _pack(self, update: _Update, plans: list[PackPlan], tensors: TensorTree | list[Tensor]) -> bool:
        update.started = time.perf_counter()
        occupied = set[int]().union(*self.occupied())
        free = next((slot for slot in range(len(plans)) if slot not in occupied), None)
        if free is None:
            return False
        update.slot, update.waited = free, time.perf_counter()
        self.set_slot_version(free, 0)
        found = tensors if isinstance(tensors, list) else tensors.tensors()
        update.extracted = time.perf_counter()
        filled = plans[free].fill(found)
        update.packed = time.perf_counter()
        return filled

    def _publish_all(self, update: _Update) -> list[int]:
        """Point every worker to the slot, and wake it if needed; return the workers with a mutex that was not free."""
        self._words[record_at(len(self._blocks), update.slot) + SLOT_EXTRA_SIZE] = 0
        self.set_slot_version(update.slot, update.version)
        others: list[int] = []
        for worker in range(len(self._blocks)):
            try:
                wakeups = self.publish(worker, update.version, update.slot, update.acknowledge, MUTEX_TIMEOUT)
            except SyncTimeout:
                others.append(worker)
                continue
            if update.acknowledge or wakeups:  # a failure is noticed by the reader of the connection
                send_message(update.descriptors[worker], Message(UPDATE, worker, update.version))
        update.published = time.perf_counter()
        return others

    def _await_answers(self, update: _Update, timeout: float | None) -> bool:
        """Wait until all workers have acknowledged; False at another message, a death or the deadline.

        The worker that was woken last mostly answers last. It is waited for first, so this thread is woken only once.
        """
        workers = len(self._blocks)
        until = None if timeout is None else time.monotonic() + timeout
        for worker in reversed(range(workers)):
            connection, process = update.descriptors[worker], update.descriptors[workers + worker]
            poll = select.poll()
            poll.register(connection, select.POLLIN)
            poll.register(process, select.POLLIN)
            left = None if until is None else min(max(0.0, until - time.monotonic()) * 1000, _LONGEST)
            if connection not in dict(poll.poll(left)):
                return False
            message = take_message(connection, ACK, update.version)
            if message is None:
                return False
            update.answers[worker] = message
        return True

    def _report(self, update: _Update, began: float, finished: float) -> SyncReport:
        """Return what the update has cost."""
        slowest = max(update.answers.values(), key=lambda answer: answer.wait + answer.apply, default=Message(ACK, -1))
        phases = split_phases(
            extract=update.started - began + update.extracted - update.waited,
            wait=update.waited - update.started,
            pack=update.packed - update.extracted,
            transfer=update.published - update.packed,
            left=finished - update.packed,
            worker_wait=slowest.wait,
            worker_apply=slowest.apply,
        )
        workers = dict.fromkeys(range(len(self._blocks)), update.version)
        return SyncReport(update.version, self._nbytes, finished - began, phases, workers)
