"""The send path: what a trainer does with an update, the same for every backend.

source ─→ loader.load ─→ end.publish ─→ (answers) ─→ report, or one error that names who lacks it
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from wsync.deadlines import deadline_in
from wsync.errors import NotConnected
from wsync.sending.end import SenderEnd
from wsync.sending.fast_sender import FastSender
from wsync.sending.in_flight import InFlight
from wsync.sending.loading import Loader, Packed
from wsync.sending.source import Source
from wsync.types import Ack, SyncReport
from wsync.weights.layout import Layout


class Sender(FastSender):
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
        super().__init__(end, source, num_workers, timeout, published=published, record=record)
        self.num_workers = num_workers
        self.connected = False
        self._delivers_at_connect = delivers_at_connect
        self._loader = Loader(end, source, self._members)
        self._in_flight: list[InFlight] = []
        self._unmapped: set[int] = set()  # workers that were told what weights look like after they had joined

    @property
    def layout(self) -> Layout | None:
        """What the weights look like; None before the first."""
        return self._loader.layout

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
                self._loader.plan(None)
            deadline = posted.deadline if posted else deadline_in(self._answers.timeout)
            self._end.admit(everyone, sentinels, deadline)
            self._members.restore(everyone)  # a second connect lets successors in
            self.connected = True
            if posted:
                # Not reported as an update's cost: the workers may have taken seconds to start.
                self._answers.expect(posted.workers, posted.version, posted.deadline)
                self._arm_fast_path(weights)

    def dismiss(self, worker: int) -> None:
        """Take a worker for dead: nothing is sent to it, and what is for all is kept for who comes in its place."""
        with self.alone():
            self._end.forget(worker)
            self._excuse([worker])
            self._members.strike([worker])

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
            self._members.restore([worker])
            version = self._members.due.get(worker)
            if version:
                self._answers.expect([worker], version, deadline)

    def _send_slowly(self, weights: object, worker_ids: int | Sequence[int] | None, *, wait: bool) -> SyncReport | None:
        with self.alone():
            self._require_connected()
            workers, absent = self._members.addressees(worker_ids)
            posted = self._post(weights, workers, absent, acknowledge=not (wait and self._published))
            self._excuse(posted.workers)
            if wait:
                report = self._settle(posted)
                if worker_ids is None:
                    self._arm_fast_path(weights)
                return report
            self._in_flight.append(posted)
            self._end.listen()
            return None

    def _arm_fast_path(self, weights: object) -> None:
        if self.layout is not None and not self._in_flight:
            self._arm(weights, self.layout)

    def _excuse(self, workers: Collection[int]) -> None:
        """Await no older answers of ``workers``: they are given, or owe, a newer one, or are named in an error."""
        for older in self._in_flight:
            older.workers = [worker for worker in older.workers if worker not in workers]
        self._in_flight = [older for older in self._in_flight if older.workers]

    def wait(self) -> SyncReport | None:
        """Wait for everything that was sent without waiting; the newest one's report."""
        with self.alone():
            report = None
            while self._in_flight:  # after an error the others are still waited for, by the next call
                report = self._settle(self._in_flight.pop(0))
            return report

    def _require_connected(self) -> None:
        if not self.connected:
            raise NotConnected("not connected yet: call connect() on the sender (and on every worker) before send()")

    def _post(self, weights: object, workers: Sequence[int], absent: Sequence[int], *, acknowledge: bool) -> InFlight:
        with self._loaded(weights, workers, absent) as (posted, packed):
            # Parameters are bound or not, but a module's set_extra_state may raise: that has to be answered for. And
            # nobody can be bound to memory that it does not know of yet.
            unsure = not self._unmapped.isdisjoint(workers) or any([extra for _, _, extra in packed])
            posted.acknowledge = acknowledge = acknowledge or unsure
            for part, buffer, extra in packed:
                self._end.publish(buffer, posted.version, extra, part.workers, acknowledge)
        self._members.note(posted.version, posted.blobs)
        posted.transfer = time.perf_counter() - posted.packed
        return posted

    @contextmanager
    def _loaded(
        self, weights: object, workers: Sequence[int], absent: Sequence[int], *, keep: bool = False
    ) -> Iterator[tuple[InFlight, Sequence[Packed]]]:
        """The next version, in buffers that are released if the block raises."""
        deadline = deadline_in(self._answers.timeout)
        if self.layout is None and self.connected:
            self._agree(weights, deadline)
        with self._loader.loaded(weights, workers, absent, self.version + 1, deadline, keep=keep) as loaded:
            self.version += 1
            yield loaded

    def _agree(self, weights: object, deadline: float | None) -> None:
        """Ask the workers, who may have the only model, whether the first weights fit: others will be like these."""
        workers, version, layout = self._members.present, self.version + 1, self._loader.sketch(weights)
        try:
            self._end.propose(layout, version)
            self._answers.expect(workers, version, deadline, given=False)
        except BaseException:
            self.version = version  # it is not used again: an answer to it may be late
            raise
        self._unmapped.update(workers)

    def _settle(self, posted: InFlight) -> SyncReport:
        """Wait for the answers, if they are wanted; report, or raise."""
        acks: Sequence[Ack] = ()
        if posted.acknowledge:
            acks = self._answers.expect(posted.workers, posted.version, posted.deadline)
            self._unmapped.difference_update(posted.workers)
        else:
            self._answers.hear_of_failures(posted.workers, posted.version)
        report = posted.report(self.layout.nbytes if self.layout else 0, acks, time.perf_counter())
        self._record(report)
        return report

    # --- all or nothing: see transaction.py ---

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other threads' updates waiting while it is open; what is done then is not usual, so no path is fast."""
        with self._lock:
            self._disarm()
            yield

    def stage(self, weights: object, worker_ids: int | Sequence[int] | None, transaction: int) -> InFlight:
        """Have every worker check an update and keep it ready; raises if one says no."""
        with self.alone():
            self._require_connected()
            workers, absent = self._members.addressees(worker_ids)
            with self._loaded(weights, workers, absent, keep=True) as (posted, packed):
                for part, buffer, extra in packed:
                    self._end.stage(buffer, posted.version, extra, part.workers, transaction)
            self._excuse(workers)
            self._answers.expect(workers, posted.version, posted.deadline, given=False)
            return posted

    def decide(self, posted: InFlight, transaction: int) -> None:
        """Have the workers install what they staged."""
        with self.alone():
            posted.deadline = deadline_in(self._answers.timeout)
            self._end.decide(posted.version, transaction)
            self._members.note(posted.version, posted.blobs)
            posted.transfer = time.perf_counter() - posted.packed

    def settle(self, posted: InFlight) -> SyncReport:
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
