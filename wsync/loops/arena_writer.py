"""The sender's part of an arena's words: pointing workers to slots, and finding slots that may be written.

``shm/arena.py`` explains why no slot is written while a forward uses it. ``WorkerSlot.take`` explains the order of the
loads and stores that are made without the mutex.
"""

from __future__ import annotations

import os
import select
import time
from array import array
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from wsync.errors import SyncTimeout, in_forked_child
from wsync.loops.messages import ACK, UPDATE, Message, send_message, take_message
from wsync.loops.pack_plan import PackPlan
from wsync.loops.peer_watch import PeerWatch
from wsync.loops.tensor_tree import TensorTree
from wsync.loops.words import (
    AWAITED,
    HELD,
    NONE,
    PUBLISHED,
    TAKEN,
    USED,
    WAKEUPS,
    Block,
    published_word,
    slot_in,
    version_in,
)
from wsync.types import SyncReport, split_phases

MUTEX_TIMEOUT = 0.01  # seconds; a worker that is stopped inside its mutex is left to the caller of update()
_LONGEST = 2**31 - 1  # milliseconds that poll() takes

UpdateResult = SyncReport | tuple[SyncReport, int, list[int], bytes] | None


@dataclass(slots=True)
class _Update:
    """One update in progress; the last five attributes are when each phase ended, on ``time.perf_counter``."""

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
    """Writes the words of all workers of one sender. Used in the sender's process, under the channel's lock.

    Args:
        words: of the arena, in items of 8 bytes.
        workers: the number of workers.
        block: words per worker.
        extra: the index of the first word with the size of a slot's extra state.
        nbytes: of one copy of the weights; for reports.

    Raises:
        ValueError: ``words`` are too few.
    """

    def __init__(self, words: memoryview, workers: int, block: int, extra: int, nbytes: int, /) -> None:
        if workers * block > extra or extra > len(words):
            raise ValueError("there are fewer words than workers need")
        self._words = words
        self._extra = extra
        self._nbytes = nbytes
        self._creator = os.getpid()
        self._blocks = [Block(words, worker * block) for worker in range(workers)]

    def _require_creator(self) -> None:
        if os.getpid() != self._creator:
            raise in_forked_child()

    def _block(self, worker: int) -> Block:
        if not 0 <= worker < len(self._blocks):
            raise IndexError(f"there is no worker {worker}")
        return self._blocks[worker]

    def initialise(self) -> None:
        """Make the mutexes and set all words: version 0, no slot in use, wake-ups wanted. Called once."""
        for block in self._blocks:
            block.mutex.initialise()
            for word, value in ((PUBLISHED, 0), (USED, NONE), (HELD, NONE), (TAKEN, 0), (WAKEUPS, 1), (AWAITED, 0)):
                block[word] = value

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
            return bool(block[WAKEUPS])
        finally:
            block.mutex.unlock()

    def published(self, worker: int, /) -> tuple[int, int]:
        """Return the ``(version, slot)`` that a worker is pointed to; version 0 if there is none."""
        word = self._block(worker)[PUBLISHED]
        return version_in(word), slot_in(word)

    def occupied(self, again: Collection[int], /) -> tuple[set[int], set[int], set[int]]:
        """Return three sets of slots: those that workers may start to use, that forwards use, and that workers hold.

        Args:
            again: workers that may start to use the published slot although they have taken it before: bound ones, and
                those that may be replaced.
        """
        needed = [self._needed(block, worker in again) for worker, block in enumerate(self._blocks)]
        named, used, held = ({*slots} - {NONE} for slots in zip(*needed, strict=True))
        return named, used, held

    def _needed(self, block: Block, again: bool) -> tuple[int, int, int]:
        """The three slots of one worker, or ``NONE``. The loads are in the opposite order of the worker's stores."""
        word = block[PUBLISHED]
        version = version_in(word)
        named = slot_in(word) if version and (again or block[TAKEN] < version) else NONE
        return named, block[USED], block[HELD]

    def await_free(self, worker: int, timeout: float | None, /) -> bool:
        """Have a worker send a message when its forward ends; return False if it has no slot in use.

        Raises:
            SyncTimeout, NotConnected: as ``publish``.
        """
        self._require_creator()
        block = self._block(worker)
        try:
            block.mutex.lock(timeout)
            busy = block[USED] != NONE
            block[AWAITED] = busy
            return busy
        finally:
            block.mutex.unlock()

    def vacate(self, worker: int, timeout: float, /) -> None:
        """Reset a dead worker's words: no slot is in use, and its replacement has taken none.

        A worker that is treated as dead may be stopped while it holds the mutex: after ``timeout`` seconds its words
        are reset without it.

        Raises:
            NotConnected: this process is a forked child.
        """
        self._require_creator()
        block = self._block(worker)
        try:
            with suppress(SyncTimeout):
                block.mutex.lock(timeout)
            for word, value in ((HELD, NONE), (USED, NONE), (AWAITED, 0), (TAKEN, 0)):
                block[word] = value
        finally:
            block.mutex.unlock()

    def update(
        self,
        plans: list[PackPlan],
        descriptors: bytes,
        keep_published: bool,
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
            keep_published: whether a slot counts as used while it is published, see ``Arena.fast_update``.
            watch: over ``descriptors``, to notice deaths and errors; None to wait for acknowledgements instead.
            tensors: in the order of the layout.
            version: the update's.
            timeout: seconds to wait for acknowledgements; None for no limit.
            began: when the call began, on ``time.perf_counter``.

        Returns:
            A report. If the update is published but not finished: the fields of a ``UnfinishedUpdate``. None, and
            nothing was done, if a worker is missing, no slot is free, or the tensors are not plain bytes that fit.

        Raises:
            NotConnected: this process is a forked child.
        """
        self._require_creator()
        numbers = array("i", descriptors)
        if len(numbers) != 2 * len(self._blocks):
            return None
        update = _Update(version, watch is None, numbers, NONE, {})
        if not self._pack(update, plans, keep_published, tensors):
            return None
        others = self._publish_all(update)
        settled = not others and (self._await_answers(update, timeout) if watch is None else not watch.has_events())
        report = self._report(update, began, time.perf_counter())
        if settled:
            return report
        return report, update.slot, others, bytes(worker in update.answers for worker in range(len(self._blocks)))

    def _pack(
        self, update: _Update, plans: list[PackPlan], keep_published: bool, tensors: TensorTree | list[Tensor]
    ) -> bool:
        update.started = time.perf_counter()
        named, used, held = self.occupied(range(len(self._blocks)) if keep_published else ())
        busy = named | used | held
        free = next((slot for slot in range(len(plans)) if slot not in busy), None)
        if free is None:
            return False
        update.slot, update.waited = free, time.perf_counter()
        found = tensors if isinstance(tensors, list) else tensors.tensors()
        update.extracted = time.perf_counter()
        filled = plans[free].fill(found)
        update.packed = time.perf_counter()
        return filled

    def _publish_all(self, update: _Update) -> list[int]:
        """Point every worker to the slot, and wake it if needed; return the workers with a mutex that was not free."""
        self._words[self._extra + update.slot] = 0
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
