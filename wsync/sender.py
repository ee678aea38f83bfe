"""The send path: what a trainer does with an update, the same for every backend.

source ─→ layout.pack ─→ end.publish ─→ (answers) ─→ report, or one error that names who lacks it
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from wsync.binding import dump_extra
from wsync.deadlines import deadline_in
from wsync.errors import NotConnected, SyncTimeout, WorkerDied, WorkerError, WorkerFailed
from wsync.layout import Layout
from wsync.source import Part, Source
from wsync.transport import Buffer, SenderEnd
from wsync.types import Ack, SyncReport


@dataclass(slots=True)
class Posted:
    """An update on its way."""

    version: int
    workers: Sequence[int]
    started: float
    deadline: float | None
    acknowledge: bool
    phases: dict[str, float] = field(default_factory=dict)


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
        self._timeout = timeout
        self._delivers_at_connect = delivers_at_connect
        self._published = published
        self._record = record
        self._extra: dict[int, bytes] = {}  # each worker's extra state, as last sent
        self._lost: set[int] = set()
        self._posted: list[Posted] = []
        self._newest = 0  # the version that workers were last told to use: one that was only staged is not
        self._lock = threading.RLock()

    def connect(self, weights: object, sentinels: Mapping[int, int]) -> None:
        """The rendezvous with every worker; delivers the first weights, if there are any.

        Raises:
            SyncTimeout: some worker never came, or did not install them in time.
            WorkerDied, WorkerFailed: naming the worker; a failure carries its traceback.
        """
        with self._lock:
            everyone = range(self.num_workers)
            posted = None
            if weights is not None or (self._delivers_at_connect and self.source.weights is not None):
                posted = self._post(weights, everyone, acknowledge=True)
            elif self.source.weights is not None:
                self._layout(None)
            deadline = posted.deadline if posted else deadline_in(self._timeout)
            self._end.admit(everyone, sentinels, deadline)
            self.connected = True
            if posted:
                self._await(posted)  # not an update's cost: the workers may have taken seconds to start

    def admit(self, worker: int, sentinel: int | None = None, timeout: float | None = None) -> None:
        """Let one worker join again, after its predecessor died; it gets the newest published version.

        Args:
            worker: its index.
            sentinel: readable when its process has ended.
            timeout: seconds; None for those of ``connect``.

        Raises:
            SyncTimeout, WorkerDied, WorkerFailed: it did not come, or not with these weights.
        """
        with self._lock:
            deadline = deadline_in(self._timeout if timeout is None else timeout)
            self._end.admit([worker], {} if sentinel is None else {worker: sentinel}, deadline)
            self._lost.discard(worker)
            if self._newest:
                self._judge([worker], self._newest, self._end.collect([worker], self._newest, deadline))

    def send(self, weights: object, worker_ids: int | Sequence[int] | None, *, wait: bool) -> SyncReport | None:
        """Deliver an update; with ``wait``, return when the promise of a finished send holds."""
        with self._lock:
            posted = self._post(weights, self._addressees(worker_ids), acknowledge=not (wait and self._published))
            if wait:
                self._posted.clear()  # whoever has this version, or is named in an error, needs no older one
                return self._settle(posted)
            self._posted.append(posted)
            return None

    def wait(self) -> SyncReport | None:
        """Wait for everything that was sent without waiting; the newest one's report."""
        with self._lock:
            posted, self._posted = self._posted, []
            newest: dict[int, Posted] = {worker: update for update in posted for worker in update.workers}
            report = None
            for update in posted:
                update.workers = [worker for worker in update.workers if newest[worker] is update]
                if update.workers:
                    report = self._settle(update)
            return report

    def _addressees(self, worker_ids: int | Sequence[int] | None) -> Sequence[int]:
        if not self.connected:
            raise NotConnected("not connected yet: call connect() on the sender (and on every worker) before send()")
        alive = [worker for worker in range(self.num_workers) if worker not in self._lost]
        if worker_ids is None:
            if not alive:
                raise NotConnected("every worker has died or left: there is nobody to send to")
            return alive
        wanted = [worker_ids] if isinstance(worker_ids, int) else list(dict.fromkeys(worker_ids))
        unknown = [worker for worker in wanted if worker not in range(self.num_workers)]
        if unknown:
            raise ValueError(f"unknown worker_ids {unknown}: there are workers 0 to {self.num_workers - 1}")
        dead = {worker: "has died or left before" for worker in wanted if worker in self._lost}
        if dead:
            raise WorkerDied(f"worker(s) {sorted(dead)} have died or left; the others are {alive}", dead)
        if not wanted:
            raise ValueError("worker_ids is empty: name at least one worker, or None for all")
        return wanted

    def _layout(self, weights: object) -> Layout:
        if self.layout is None:
            if weights is None and self.source.weights is None:
                raise NotConnected("nothing to send: no model or weights were given, neither at init nor now")
            self.layout = Layout.of(self.source.first(weights))
            self._end.prepare(self.layout)
        return self.layout

    def _post(self, weights: object, workers: Sequence[int], *, acknowledge: bool) -> Posted:
        posted, packed = self._pack(weights, workers)
        # Parameters are bound or not, but a module's set_extra_state may raise: that has to be answered for.
        posted.acknowledge = acknowledge or any(extra for _, _, extra in packed)
        started = time.perf_counter()
        for part, buffer, extra in packed:
            self._end.publish(buffer, posted.version, extra, part.workers, posted.acknowledge)
        self._newest = posted.version
        posted.phases["transfer"] = time.perf_counter() - started
        return posted

    def _pack(self, weights: object, workers: Sequence[int]) -> tuple[Posted, list[tuple[Part, Buffer, bytes]]]:
        """Check everything, then copy it into buffers that no worker reads."""
        started = time.perf_counter()
        deadline = deadline_in(self._timeout)
        layout = self._layout(weights)
        parts = self.source.parts(weights, workers, layout)
        blobs = [self._blob(part) for part in parts]
        extracted = time.perf_counter()
        waited = 0.0
        buffers: list[Buffer] = []
        try:
            for part in parts:
                before = time.perf_counter()
                buffers.append(self._end.reserve(part.workers, deadline))
                waited += time.perf_counter() - before
                layout.pack(part.tensors, buffers[-1].views)
        except BaseException:
            self._end.release(buffers)
            raise
        self.version += 1
        self._extra.update((worker, blob) for part, blob in zip(parts, blobs, strict=True) for worker in part.workers)
        pack = time.perf_counter() - extracted - waited
        phases = {"extract": extracted - started, "wait": waited, "pack": pack}
        posted = Posted(self.version, workers, started, deadline, True, phases)
        return posted, list(zip(parts, buffers, blobs, strict=True))

    def _blob(self, part: Part) -> bytes:
        """A part's extra state; weights that cannot say (a plain TensorDict) leave it as it was."""
        return dump_extra(part.extra) if part.extra is not None else self._extra.get(part.workers[0], b"")

    def _settle(self, posted: Posted) -> SyncReport:
        """Wait for the answers, if they are wanted; report, or raise."""
        before = time.perf_counter()
        acks = self._await(posted)
        finished = time.perf_counter()
        slowest = max(acks, key=lambda ack: ack.wait + ack.apply, default=Ack(0, 0))
        posted.phases["wait"] += slowest.wait
        posted.phases["apply"] = slowest.apply
        posted.phases["acknowledge"] = max(0.0, finished - before - slowest.wait - slowest.apply)
        nbytes = self.layout.nbytes if self.layout else 0
        versions = dict.fromkeys(posted.workers, posted.version)
        report = SyncReport(posted.version, nbytes, finished - posted.started, posted.phases, versions)
        self._record(report)
        return report

    def _await(self, posted: Posted) -> list[Ack]:
        """The answers to an update; raises if one is missing, or says no."""
        if posted.acknowledge:
            acks = self._end.collect(posted.workers, posted.version, posted.deadline)
            self._judge(posted.workers, posted.version, acks)
            return acks
        # Nobody answers; but a death, or an error of before, is an event that has happened or not.
        acks = self._end.collect(posted.workers, 0, deadline_in(0.0))
        self._judge((), posted.version, [ack for ack in acks if ack.died or ack.error])
        return []

    def _judge(self, workers: Collection[int], version: int, acks: Sequence[Ack]) -> None:
        """Raise one error for all workers that lack ``version``; those who died are not sent to again."""
        died = {ack.worker: ack.error for ack in acks if ack.died}
        failed = {ack.worker: ack.error for ack in acks if ack.error and not ack.died}
        silent = set(workers) - {ack.worker for ack in acks}
        self._lost |= died.keys()
        if not (died or failed or silent):
            return
        causes = {**died, **failed, **dict.fromkeys(silent, f"did not answer within {self._timeout} s")}
        have = sorted(set(workers) - causes.keys())
        lines = [f"worker {worker}: {cause.strip()}" for worker, cause in sorted(causes.items())]
        message = f"version {version} is missing on {len(causes)} worker(s); those who have it: {have}\n" + "\n".join(
            lines
        )
        kind: type[WorkerError] = WorkerDied if died else WorkerFailed if failed else SyncTimeout
        raise kind(message, causes, version, failed)

    # --- all or nothing: see transaction.py ---

    def stage(self, weights: object, worker_ids: int | Sequence[int] | None, transaction: int) -> Posted:
        """Have every worker check an update and keep it ready; raises if one says no."""
        with self._lock:
            workers = self._addressees(worker_ids)
            posted, packed = self._pack(weights, workers)
            for part, buffer, extra in packed:
                self._end.stage(buffer, posted.version, extra, part.workers, transaction)
            self._judge(workers, posted.version, self._end.collect(workers, posted.version, posted.deadline))
            return posted

    def decide(self, posted: Posted, transaction: int) -> None:
        """Have the workers install what they staged."""
        with self._lock:
            posted.deadline = deadline_in(self._timeout)
            self._end.decide(posted.version, posted.workers, transaction)
            self._newest = posted.version

    def settle(self, posted: Posted) -> SyncReport:
        """Wait until a decided update is installed."""
        with self._lock:
            return self._settle(posted)

    def drop(self, transaction: int) -> None:
        """Have the workers forget what they staged. Its version number is not used again."""
        with self._lock:
            self._end.drop(range(self.num_workers), transaction)

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            self.connected = False
            self._end.close()
