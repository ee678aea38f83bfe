"""The workers of a collector: their lifecycle (``records.py`` lists the states), and a collector's operations on them.

One thread gathers batches while other threads deliver weights. Both handle the workers' events, under one lock.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any, TypeVar

import wsync
from collectors.batches import frames_of
from collectors.worker import WorkerOptions
from collectors.workers.pool import Event, WakeEvent, WorkerHandle, WorkerPool
from collectors.workers.records import FailureCause, FailurePolicy, Failures, WorkerRecord, WorkerState

T = TypeVar("T")
Send = Callable[[Any, Any], T]
"""``send(weights, worker_ids)``, as ``WeightSyncScheme.send``; of several schemes, with ``{scheme: weights}``."""

_ENDED = ("error", "died")
_REJOIN_TIMEOUT = 10.0  # seconds that a restarted worker has to join a scheme, or the scheme's timeout if longer
_STOP_GRACE = 2.0  # seconds in which a batch has to be complete after ``interrupt``
_CLOSE_GRACE = 2.0  # seconds in which a thread that gathers or updates has to notice ``close``
_ERROR_GRACE = 2.0  # seconds in which a worker that has left a scheme has to report its error
_log = logging.getLogger(__name__)


class WorkerGroup:
    """Handles the events of workers: starts, failures, restarts; gathers their batches, delivers weights to them.

    Attributes:
        ended_by_failure: whether a failure was raised; the collector cannot be used any more.
        closing: whether the workers are being ended, or have been.
    """

    def __init__(
        self,
        pool: WorkerPool,
        failure_policy: FailurePolicy,
        schemes: Mapping[str, wsync.WeightSyncScheme],
        failures: Failures,
    ) -> None:
        self.pool, self.failure_policy, self.schemes, self.failures = pool, failure_policy, schemes, failures
        self.ended_by_failure = self.closing = False
        self._records: list[WorkerRecord] = []
        self._events: deque[Event] = deque()  # received, and not yet handled
        self._batches: deque[tuple[WorkerHandle, int]] = deque()
        self._found: dict[int, bytes] = {}  # by ``find``, by worker
        self._started = False
        self._next_seed: int | None = None
        self._stop_at: float | None = None
        self._wakeup = WakeEvent()
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._owner: int | None = None  # the thread that holds the lock

    @contextmanager
    def _locked(self, timeout: float = -1.0) -> Iterator[None]:
        """Hold the lock, which is re-entrant; a thread that waits for events under it is woken, and lets it go.

        Threads get it in turns. After ``timeout`` seconds the block runs without it: its owner may be stuck.
        """
        if self._owner == threading.get_ident():
            yield
            return
        taken, turn = False, self._turn.acquire(timeout=timeout)
        try:
            if turn and not (taken := self._lock.acquire(blocking=False)):
                self._wakeup.set()
                taken = self._lock.acquire(timeout=timeout)
        finally:
            if turn:
                self._turn.release()
        try:
            if taken:
                self._owner = threading.get_ident()
            yield
        finally:
            if taken:
                self._owner = None
                self._lock.release()

    # --- at the start, in one thread ---

    def build(self, specs: Sequence[bytes], options: Sequence[WorkerOptions]) -> None:
        """Build all workers. Called once, before any other method."""
        self._records = [
            WorkerRecord(options[worker.worker_idx], specs[worker.worker_idx], self.failure_policy, worker)
            for worker in self.pool.workers
        ]
        for record in self._records:
            self._build(record)
        self._step_until(WorkerState.READY)
        if self.failure_policy.on_failure != "restart":  # no successors, and each specification may have a large policy
            for record in self._records:
                record.spec = b""

    def find(self, path: str) -> list[bytes]:
        """Return the pickled object at a path in each worker. Called between ``build`` and ``connect``."""
        self._found.clear()
        for record in self._records:
            self._send(record.worker, "find", path)
        while len(self._found) < len(self._records):
            self._step()
        return [self._found[record.index] for record in self._records]

    def connect(self) -> None:
        """Connect all workers by the schemes that there are now. Called once, after ``build`` and ``find``."""
        for record in self._records:
            self._connect(record)
        for scheme in self.schemes.values():
            try:
                scheme.connect()
            except (wsync.WorkerDied, wsync.SyncTimeout) as error:
                self.raise_worker_error(error)
                raise
        self._step_until(WorkerState.ACTIVE)
        self._started = True

    def _step_until(self, state: WorkerState) -> None:
        while any(record.state is not state for record in self._records):
            self._step()

    def _build(self, record: WorkerRecord) -> None:
        record.state = WorkerState.BUILDING
        self._send(record.worker, "build", (record.spec, record.options))

    def _connect(self, record: WorkerRecord) -> None:
        record.state = WorkerState.CONNECTING
        self._send(record.worker, "connect", list(self.schemes))

    # --- for the thread that gathers ---

    @property
    def active_workers(self) -> list[WorkerHandle]:
        """The workers that take part in gathering, by index."""
        return [record.worker for record in self._records if record.worker is not None and record.active]

    def wait_for_workers(self) -> list[WorkerHandle]:
        """Return the active workers; wait for one if there is none."""
        if any(record.state not in (WorkerState.ACTIVE, WorkerState.DROPPED) for record in self._records):
            with self._locked():
                self._step(wait_for_events=False)
        while not (active := self.active_workers):
            with self._locked():
                self._step()
        return active

    def collect(self, worker: WorkerHandle, buffer: int) -> None:
        """Have ``worker`` fill a buffer; do nothing if it was replaced."""
        with self._locked():
            self._send(worker, "collect", buffer)

    def next_batch(self, awaited: Collection[WorkerHandle]) -> tuple[WorkerHandle, int] | None:
        """Return the next batch (its worker, which may have failed since, and the buffer), or None to look again."""
        with self._locked():
            if not self._batches and any(worker in awaited for worker in self.active_workers):
                self._step()
            return self._batches.popleft() if self._batches else None

    def batch_begun(self) -> None:
        """Limit the batch that begins now, if ``interrupt`` was called between two batches."""
        if self._stop_at is not None:
            self._stop_at = time.monotonic() + _STOP_GRACE

    def batch_completed(self) -> None:
        """Forget an ``interrupt``: the batch that it was for is complete."""
        self._stop_at = None

    def seed(self, seed: int) -> int:
        """Seed every worker; return the next free seed, which restarted workers take."""
        with self._locked():
            for record in self._records:
                if record.worker is not None and record.active:
                    record.worker.send("seed", seed)
                seed += record.num_envs
            self._next_seed = seed
            return seed

    def resume(self, frames: int) -> None:
        """Count ``frames`` of an earlier run, evenly for each worker: fewer random frames are left."""
        share = -(-frames // len(self._records))
        with self._locked():
            for record in self._records:
                record.frames = share
                if record.worker is not None and record.active:
                    record.worker.send("resume", share)

    # --- for threads that deliver weights ---

    def deliver(self, send: Send[T], weights: Any, worker_ids: int | Sequence[int] | None) -> T | None:
        """Return ``send(weights, worker_ids)``, tried again for the other workers where a failure prevented it.

        For the policies ``drop`` and ``restart``. None if a worker failed meanwhile, and the others have the update.
        """
        everyone = range(len(self._records))
        wanted = everyone if worker_ids is None else wsync.worker_list(worker_ids, len(everyone))
        if not wanted:
            return send(weights, worker_ids)  # raises the error for an empty selection
        with self._locked():
            while True:
                reachable = self._reachable(wanted, wait_for_all=worker_ids is not None)
                try:
                    if worker_ids is None:
                        return send(weights, None)  # the scheme keeps it for workers that are being restarted
                    return send(_weights_for(weights, reachable), reachable)
                except (wsync.WorkerDied, wsync.SyncTimeout) as error:
                    if not self._fail_unreached(reachable, error) and error.version is None:
                        raise
                    if error.version is not None:
                        return None

    def _reachable(self, wanted: Collection[int], *, wait_for_all: bool) -> list[int]:
        """Return those of ``wanted`` that get updates; wait for one, or for all of them that were not dropped."""
        while True:
            left = [worker for worker in wanted if self._records[worker].state is not WorkerState.DROPPED]
            if not left:
                causes = dict.fromkeys(wanted, "was dropped")
                raise wsync.WorkerDied(f"worker(s) {sorted(wanted)} were dropped: no worker is left to send to", causes)
            reachable = [worker for worker in left if self._records[worker].gets_updates]
            if reachable and (len(reachable) == len(left) or not wait_for_all):
                return reachable
            self._step()

    def _fail_unreached(self, addressed: Collection[int], error: wsync.WorkerDied | wsync.SyncTimeout) -> bool:
        """Fail the workers that an update did not reach; return whether there were any."""
        unreached = [worker for worker in addressed if worker in error.workers and worker not in error.failed]
        for record in [self._records[worker] for worker in unreached]:
            if record.worker is not None:
                self._error_of(record.worker, _patience_after(error))
        # Before workers are failed below: finished batches are still delivered, and a traceback is the better cause.
        self._handle_events()
        for worker in unreached:
            record, detail = self._records[worker], error.workers[worker].strip()
            if record.gets_updates:
                self._fail(record, FailureCause(type(error), worker, f"lacks an update: {detail}"))
        if error.failed:
            failed = {worker: error.workers[worker] for worker in error.failed}
            raise wsync.WorkerFailed(str(error), failed, error.version, failed) from error
        return bool(unreached)

    def raise_worker_error(self, error: wsync.WorkerDied | wsync.SyncTimeout) -> None:
        """For the policy ``raise``: raise what a worker that an update did not reach has reported, if it has."""
        died = isinstance(error, wsync.WorkerDied)
        if died or error.version is not None:
            self.failures.failed |= Counter(error.workers.keys() - error.failed)  # each once
        with self._locked():
            if self.ended_by_failure or self.closing:
                return  # another thread has raised it, or has shut the collector down
            for record in [self._records[index] for index in error.workers]:
                if record.worker is not None:
                    cause = self._error_of(record.worker, _patience_after(error))
                    if cause is not None:
                        self._fail(record, cause)
            self.ended_by_failure = died

    # --- for any thread ---

    def interrupt(self) -> None:
        """See ``BaseCollector.interrupt``."""
        self._stop_at = time.monotonic() + _STOP_GRACE
        self._wakeup.set()

    def close(self) -> None:
        """End all workers. Idempotent. A thread that waits for a batch meanwhile gets ``NotConnected``."""
        self.closing = True
        with self._locked(_CLOSE_GRACE):
            for record in self._records:
                if self._started and record.worker is not None and not record.active:
                    self.pool.discard(record.worker)
                    record.worker = None
            self.pool.close()
            self._wakeup.close()

    # --- events; the lock is held ---

    def _send(self, worker: WorkerHandle | None, command: str, argument: Any) -> None:
        """Send a command that has an answer; do nothing if the worker was replaced."""
        assert worker is not None
        record = self._records[worker.worker_idx]
        if record.worker is worker:
            if not record.answers_owed:
                record.waiting_since = time.monotonic()
            record.answers_owed += 1
            worker.send(command, argument)

    def _step(self, wait_for_events: bool = True) -> None:
        """Wait for events, or for the next deadline or restart; handle them."""
        self._require_open()
        if self.ended_by_failure:
            raise wsync.NotConnected("a worker's failure was raised in another thread, and has ended this collector")
        for record in self._records:
            if record.state is WorkerState.RESTART_DUE and record.restart_at <= time.monotonic():
                self._restart(record)
        self._poll(self._time_left() if wait_for_events and not self._events else 0.0)
        self._handle_events()
        # Handling may have taken seconds, in which a worker that now seems late has answered: look again.
        while (late := self._late()) and self._poll(0.0):
            self._handle_events()
        for record in late:
            detail = f"did not answer within {self.failure_policy.worker_timeout:g} s"
            self._fail(record, FailureCause(wsync.SyncTimeout, record.index, detail))
        if self._stop_at is not None and time.monotonic() >= self._stop_at and not self._batches:
            raise wsync.SyncTimeout("asked to stop, and the batch under way is not complete")

    def _require_open(self) -> None:
        if self.closing:
            raise wsync.NotConnected("this collector has been shut down")

    def _time_left(self) -> float | None:
        """Seconds until the next deadline or restart; None if there is none."""
        times = [record.deadline for record in self._records if record.answers_owed]
        times += [record.restart_at for record in self._records if record.state is WorkerState.RESTART_DUE]
        times += [] if self._stop_at is None else [self._stop_at]
        first = min(times, default=math.inf)
        return None if first == math.inf else max(0.0, first - time.monotonic())

    def _late(self) -> list[WorkerRecord]:
        now = time.monotonic()
        return [record for record in self._records if record.answers_owed and now >= record.deadline]

    def _poll(self, timeout: float | None) -> list[Event]:
        """Receive events, to be handled later; none of a worker that has ended and is not handled yet."""
        ended = {event.worker for event in self._events if event.kind in _ENDED}
        workers = [one.worker for one in self._records if one.worker is not None and one.worker not in ended]
        events = self.pool.poll(workers, self._wakeup.fileno(), timeout)
        self._wakeup.clear()
        self._events.extend(events)
        return events

    def _error_of(self, worker: WorkerHandle, patience: float = 0.0) -> FailureCause | None:
        """Return the error that ``worker`` has sent, if it has raised; its event is still to be handled."""
        self._require_open()  # ``close`` does not wait for this thread without end
        deadline = time.monotonic() + patience
        while not any(event.worker is worker and event.kind in _ENDED for event in self._events):
            left = 0.0 if wait([worker.sentinel], 0.0) else max(0.0, deadline - time.monotonic())
            if not self._poll(left) and not left:
                break
        errors = (event for event in self._events if event.worker is worker and event.kind == "error")
        return next((FailureCause(wsync.WorkerFailed, worker.worker_idx, one.value) for one in errors), None)

    def _handle_events(self) -> None:
        while self._events:
            event = self._events.popleft()
            record = self._records[event.worker.worker_idx]
            if record.worker is event.worker:  # events of a replaced worker are dropped
                self._handle(record, event)

    def _handle(self, record: WorkerRecord, event: Event) -> None:
        worker, kind, value = event
        record.waiting_since = time.monotonic()
        if kind == "accepted":
            return
        record.answers_owed -= 1
        if kind == "batch":
            record.failures_in_a_row = 0
            index: int = value
            record.frames += frames_of(worker.batches[index])
            self._batches.append((worker, index))
        elif kind == "found":
            self._found[record.index] = value
        elif kind == "ready":
            record.state, record.num_envs = WorkerState.READY, worker.num_envs
            if self._started:
                self._rejoin(record, worker)
        elif kind == "connected":
            record.state = WorkerState.ACTIVE
            if self._started:
                self._begin_again(record, worker)
        else:
            failed = wsync.WorkerFailed if kind == "error" else wsync.WorkerDied
            self._fail(record, FailureCause(failed, record.index, value))

    # --- failures and restarts; the lock is held ---

    def _fail(self, record: WorkerRecord, cause: FailureCause) -> None:
        """Apply the failure policy to a worker: raise, drop it, or schedule its restart."""
        index = record.index
        if not self._started or self.failure_policy.on_failure == "raise":
            self.failures.failed |= Counter([index])  # an update may have counted this failure already
            self.ended_by_failure = True
            raise cause.error()
        self.failures.failed[index] += 1
        worker, record.worker, record.answers_owed = record.worker, None, 0
        if worker is not None:
            self.pool.discard(worker)  # before the schemes: a stopped process could still be within an update
            for scheme in self.schemes.values():
                scheme.disconnect(index)
        is_dropped = self.failure_policy.on_failure == "drop"
        done = self._drop(record, cause) if is_dropped else self._schedule_restart(record, cause)
        _log.warning("worker %d %s: %s", index, done, cause.message)

    def _drop(self, record: WorkerRecord, cause: FailureCause) -> str:
        record.state = WorkerState.DROPPED
        self.failures.dropped[record.index] += 1
        left = [other.index for other in self._records if other.state is not WorkerState.DROPPED]
        if not left:
            self.ended_by_failure = True
            raise cause.error("no worker is left; the last one: ")
        return f"is dropped, and {left} go on"

    def _schedule_restart(self, record: WorkerRecord, cause: FailureCause) -> str:
        pause = record.pause_before_restart()
        if pause is None:
            self.ended_by_failure = True
            often = f"more than {self.failure_policy.max_restarts} times since its last batch"
            raise cause.error(f"worker {record.index} has failed {often}; the last time: ")
        record.state, record.restart_at = WorkerState.RESTART_DUE, time.monotonic() + pause
        return f"is replaced in {pause:g} s"

    def _restart(self, record: WorkerRecord) -> None:
        try:
            record.worker = self.pool.start_worker(record.index)
        except OSError as error:
            self._fail(record, FailureCause(wsync.WorkerDied, record.index, f"could not be restarted: {error}"))
            return
        self._build(record)

    def _rejoin(self, record: WorkerRecord, worker: WorkerHandle) -> None:
        """Let a restarted worker join every scheme, while the trainer waits: usually some milliseconds."""
        self._connect(record)
        index = record.index
        process: Any = worker.process or worker  # it has ``fileno()``, and is a sentinel
        try:
            for scheme in self.schemes.values():
                timeout = None if scheme.timeout is None else max(_REJOIN_TIMEOUT, scheme.timeout)
                scheme.readmit(index, process, timeout)
        except (wsync.WeightSyncError, OSError) as error:
            own = self._error_of(worker)  # the better cause
            self._fail(record, own or FailureCause(wsync.WorkerDied, index, f"could not rejoin: {error}"))

    def _begin_again(self, record: WorkerRecord, worker: WorkerHandle) -> None:
        """Let a restarted worker repeat neither its predecessor's random frames nor its episodes."""
        self.failures.restarted[record.index] += 1
        _log.warning("worker %d has been replaced", record.index)
        worker.send("resume", record.frames)
        seed = secrets.randbits(31) if self._next_seed is None else self._next_seed
        if self._next_seed is not None:
            self._next_seed += worker.num_envs
        worker.send("seed", seed)


def _patience_after(error: wsync.WeightSyncError) -> float:
    """Seconds to wait for the error report of a worker that an update did not reach; a late one sends none."""
    return _ERROR_GRACE if isinstance(error, wsync.WorkerDied) else 0.0


def _weights_for(weights: Any, workers: Collection[int]) -> Any:
    """Restrict per-worker weights to ``workers``; of several schemes, those of each."""
    if isinstance(weights, dict) and all(isinstance(key, wsync.WeightSyncScheme) for key in weights):
        return {scheme: _weights_for(one, workers) for scheme, one in weights.items()}
    by_worker = wsync.per_worker(weights)
    return weights if by_worker is None else {worker: by_worker[worker] for worker in workers if worker in by_worker}
