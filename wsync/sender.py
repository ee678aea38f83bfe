"""The send path: what a trainer does with an update, the same for every backend.

source ─→ layout.pack ─→ end.publish ─→ (answers) ─→ report, or one error that names who lacks it
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from wsync.answers import Answers
from wsync.binding import dump_extra
from wsync.deadlines import deadline_in
from wsync.errors import NotConnected
from wsync.layout import Layout
from wsync.packing import Buffer, Packer
from wsync.posted import Posted
from wsync.roll import Roll
from wsync.shortcut import Rest, Shortcut
from wsync.source import Part, Source
from wsync.transport import SenderEnd
from wsync.types import Ack, SyncReport

Packed = tuple[Part, Buffer, bytes]
"""Weights for some workers, the buffer that they were copied into, and their extra state."""


class Sender:
    """One model, and all the workers that act with copies of it.

    Args:
        end: the trainer's end of the lines.
        source: where weights come from when a call brings none.
        num_workers: how many workers there are to be.
        timeout: seconds for ``connect`` and ``send``; None for no limit.
        delivers_at_connect: whether the first weights come with ``connect``, or with the first ``send``.
        published: a send is finished when every worker is bound to use it, not when every worker has said so.
        record: told of each finished update.
    """

    def __init__(
        self,
        end: SenderEnd,
        source: Source,
        num_workers: int,
        timeout: float | None,
        *,
        delivers_at_connect: bool = True,
        published: bool = False,
        record: Callable[[SyncReport], None],
    ) -> None:
        self.version = 0
        self.layout: Layout | None = None
        self.source = source
        self.num_workers = num_workers
        self.connected = False
        self._end = end
        self._delivers_at_connect = delivers_at_connect
        self._published = published
        self._record = record
        self._roll = Roll(num_workers)
        self._answers = Answers(end, self._roll, timeout)
        self._packer: Packer | None = None
        self._posted: list[Posted] = []
        self._shortcut: Shortcut | None = None
        self._lock = threading.RLock()

    @property
    def timeout(self) -> float | None:
        """Seconds for ``connect`` and ``send``; None for no limit."""
        return self._answers.timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        self._answers.timeout = seconds

    def connect(self, weights: object, sentinels: Mapping[int, int]) -> None:
        """The rendezvous with every worker; delivers the first weights, if there are any.

        Raises:
            SyncTimeout: some worker never came, or did not install them in time.
            WorkerDied, WorkerFailed: naming the worker; a failure carries its traceback.
        """
        with self.alone():
            everyone = range(self.num_workers)
            posted = None
            if weights is not None or (self._delivers_at_connect and self.source.weights is not None):
                posted = self._post(weights, everyone, (), acknowledge=True)
            elif self.source.weights is not None:
                self._plan(None)
            deadline = posted.deadline if posted else deadline_in(self._answers.timeout)
            self._end.admit(everyone, sentinels, deadline)
            self.connected = True
            if posted:
                # Not reported as an update's cost: the workers may have taken seconds to start.
                self._answers.expect(posted.workers, posted.version, posted.deadline)
                self._shorten(weights)

    def dismiss(self, worker: int) -> None:
        """Take a worker for dead: nothing is sent to it, and what is for all is kept for who comes in its place."""
        with self.alone():
            self._end.forget(worker)
            self._excuse([worker])
            self._roll.strike([worker])

    def admit(self, worker: int, sentinel: int | None = None, timeout: float | None = None) -> None:
        """Let one worker join again, after its predecessor died; it gets what that one was to have, or the newest.

        Args:
            worker: its index.
            sentinel: readable when its process has ended.
            timeout: seconds; None for those of ``connect``.

        Raises:
            SyncTimeout, WorkerDied, WorkerFailed: it did not come, or not with these weights.
        """
        with self.alone():
            deadline = deadline_in(self._answers.timeout if timeout is None else timeout)
            self.dismiss(worker)
            self._end.admit([worker], {} if sentinel is None else {worker: sentinel}, deadline)
            self._roll.restore(worker)
            version = self._roll.due.get(worker)
            if version:
                self._answers.expect([worker], version, deadline)

    def send(self, weights: object, worker_ids: int | Sequence[int] | None, *, wait: bool) -> SyncReport | None:
        """Deliver an update; with ``wait``, return when the promise of a finished send holds."""
        with self._lock:
            short = self._shortcut if wait and worker_ids is None else None
            if short is not None:
                report = self._hurry(short, short.own if weights is None else weights)
                if report is not None:
                    return report
        with self.alone():
            self._require_connected()
            workers, absent = self._roll.addressees(worker_ids)
            posted = self._post(weights, workers, absent, acknowledge=not (wait and self._published))
            self._excuse(posted.workers)
            if wait:
                report = self._settle(posted)
                if worker_ids is None:
                    self._shorten(weights)
                return report
            self._posted.append(posted)
            self._end.listen()
            return None

    # --- the short way: see shortcut.py ---

    def _shorten(self, weights: object) -> None:
        """Find the short way of updates like this one, which went to everybody."""
        layout, roll = self.layout, self._roll
        if layout is None or self._posted or roll.absent or roll.extra:
            return
        way, express = self.source.way(weights, layout), self._end.express()
        update = None if express is None else express.update(not self._published)
        if way is not None and express is not None and update is not None:
            self._shortcut = Shortcut(way, self.source.weights, update, express.complete)

    def _hurry(self, short: Shortcut, given: object) -> SyncReport | None:
        """Deliver an update by the short way; None, with nothing done, if it is unusual in any respect."""
        began = time.perf_counter()
        way = short.way
        found = way.tree if given is way.model else way.find(given)
        if found is None:
            return None
        self.version += 1  # first: an update that is interrupted keeps its number
        report = short.update(found, self.version, self._answers.timeout, began)
        if report is None:
            self.version -= 1
            return None
        if not isinstance(report, SyncReport):
            report = self._finish(short, Rest(*report), began)
        self._roll.due.update(report.workers)
        self._record(report)
        return report

    def _finish(self, short: Shortcut, rest: Rest, began: float) -> SyncReport:
        """Go on the long way where the short one has ended: somebody has died, or failed, or said something else."""
        self._shortcut = None
        workers, timeout = self._roll.present, self._answers.timeout
        left = None if timeout is None else max(0.0, timeout - (time.perf_counter() - began))
        self._roll.note(self.version, ((workers, b""),))
        short.complete(rest, self.version, not self._published)
        if self._published:
            self._answers.hear_of_failures(workers, self.version)
        else:
            self._answers.expect(workers, self.version, deadline_in(left))
        return rest.report._replace(seconds=time.perf_counter() - began)

    def _excuse(self, workers: Collection[int]) -> None:
        """Await no older answers of ``workers``: they are given, or owe, a newer one, or are named in an error."""
        for older in self._posted:
            older.workers = [worker for worker in older.workers if worker not in workers]
        self._posted = [older for older in self._posted if older.workers]

    def wait(self) -> SyncReport | None:
        """Wait for everything that was sent without waiting; the newest one's report."""
        with self.alone():
            report = None
            while self._posted:  # after an error the others are still waited for, by the next call
                report = self._settle(self._posted.pop(0))
            return report

    def _require_connected(self) -> None:
        if not self.connected:
            raise NotConnected("not connected yet: call connect() on the sender (and on every worker) before send()")

    def _plan(self, weights: object) -> tuple[Layout, Packer]:
        """The layout, and what packs by it; made from the first weights."""
        if self.layout is None or self._packer is None:
            layout = Layout.of(self.source.first(weights))
            self._end.prepare(layout)
            self.layout, self._packer = layout, Packer(layout)
        return self.layout, self._packer

    def _post(self, weights: object, workers: Sequence[int], absent: Sequence[int], *, acknowledge: bool) -> Posted:
        packed: list[Packed] = []
        try:
            posted = self._pack(weights, workers, absent, packed)
            # Parameters are bound or not, but a module's set_extra_state may raise: that has to be answered for.
            posted.acknowledge = acknowledge = acknowledge or any([extra for _, _, extra in packed])
            before = time.perf_counter()
            for part, buffer, extra in packed:
                self._end.publish(buffer, posted.version, extra, part.workers, acknowledge)
        except BaseException:
            self._end.release([buffer for _, buffer, _ in packed])
            raise
        self._roll.note(posted.version, posted.blobs)
        posted.transfer = time.perf_counter() - before
        return posted

    def _pack(
        self,
        weights: object,
        workers: Sequence[int],
        absent: Sequence[int],
        packed: list[Packed],
        *,
        keep: bool = False,
    ) -> Posted:
        """Check everything, then copy it into buffers that no worker reads; these go into ``packed``, one by one."""
        started = time.perf_counter()
        deadline = deadline_in(self._answers.timeout)
        layout, packer = self._plan(weights)
        parts = self.source.parts(weights, workers, absent, layout)
        blobs = [self._blob(part) for part in parts]
        extracted = time.perf_counter()
        waited = 0.0
        for part, blob in zip(parts, blobs, strict=True):
            before = time.perf_counter()
            buffer = self._end.reserve(part.workers, deadline, keep=keep)
            packed.append((part, buffer, blob))
            waited += time.perf_counter() - before
            packer.pack(part.tensors, buffer)
        self.version += 1
        pack = time.perf_counter() - extracted - waited
        extract = extracted - started
        owners = [(part.workers, blob) for part, _, blob in packed]
        return Posted(self.version, workers, owners, True, deadline, started, extract, waited, pack)

    def _blob(self, part: Part) -> bytes:
        """A part's extra state; weights that cannot say (a plain TensorDict) leave it as it was."""
        return dump_extra(part.extra) if part.extra is not None else self._roll.extra.get(part.workers[0], b"")

    def _settle(self, posted: Posted) -> SyncReport:
        """Wait for the answers, if they are wanted; report, or raise."""
        before = time.perf_counter()
        acks: Sequence[Ack] = ()
        if posted.acknowledge:
            acks = self._answers.expect(posted.workers, posted.version, posted.deadline)
        else:
            self._answers.hear_of_failures(posted.workers, posted.version)
        report = posted.report(self.layout.nbytes if self.layout else 0, acks, before, time.perf_counter())
        self._record(report)
        return report

    # --- all or nothing: see transaction.py ---

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other threads' updates waiting while it is open; what is done then is not usual, so no way is short."""
        with self._lock:
            self._shortcut = None
            yield

    def stage(self, weights: object, worker_ids: int | Sequence[int] | None, transaction: int) -> Posted:
        """Have every worker check an update and keep it ready; raises if one says no."""
        with self.alone():
            self._require_connected()
            workers, absent = self._roll.addressees(worker_ids)
            packed: list[Packed] = []
            try:
                posted = self._pack(weights, workers, absent, packed, keep=True)
                for part, buffer, extra in packed:
                    self._end.stage(buffer, posted.version, extra, part.workers, transaction)
            except BaseException:
                self._end.release([buffer for _, buffer, _ in packed])
                raise
            self._excuse(workers)
            self._answers.expect(workers, posted.version, posted.deadline)
            return posted

    def decide(self, posted: Posted, transaction: int) -> None:
        """Have the workers install what they staged."""
        with self.alone():
            posted.deadline = deadline_in(self._answers.timeout)
            self._end.decide(posted.version, transaction)
            self._roll.note(posted.version, posted.blobs)

    def settle(self, posted: Posted) -> SyncReport:
        """Wait until a decided update is installed."""
        with self.alone():
            return self._settle(posted)

    def drop(self, transaction: int) -> None:
        """Have the workers forget what they staged. Its version number is not used again."""
        with self.alone():
            self._end.drop(range(self.num_workers), transaction)

    def close(self) -> None:
        """Hang up."""
        with self.alone():
            self.connected = False
            self._end.close()
