"""The lifecycle of workers: start, connect, failure, restart. ``records.py`` lists the states."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Mapping
from multiprocessing.connection import wait
from typing import Any

import wsync
from collectors.batch_layout import frames_of
from collectors.workers.gather_lock import GatherLock
from collectors.workers.pool import RAISED, Event, WorkerHandle, WorkerPool
from collectors.workers.records import FailureCause, FailurePolicy, Failures, WorkerRecord, WorkerState

_ENDED = (*RAISED, "died", "unplaced")
_REJOIN_TIMEOUT = 10.0  # seconds that a restarted worker has to join a scheme, or the scheme's timeout if longer
_log = logging.getLogger(__name__)


class WorkerSupervisor:
    """Handles the events of workers: starts, failures, restarts. ``WorkerGroup`` adds a collector's operations.

    All methods run under ``_lock``, except while the collector is being made, when there is one thread.

    Args:
        pool: the pool of started workers, to which nothing was sent yet.
        failure_policy: what happens when a worker fails.
        schemes: by model id; a restarted worker joins them.
        failures: is updated.

    Attributes:
        ended_by_failure: whether a failure was raised; the collector cannot be used any more.
        closing: whether the workers are being ended, or have been.
    """

    def __init__(
        self,
        pool: WorkerPool[Any],
        failure_policy: FailurePolicy,
        schemes: Mapping[str, wsync.WeightSyncScheme],
        failures: Failures,
    ) -> None:
        self.pool, self.failure_policy, self.schemes, self.failures = pool, failure_policy, schemes, failures
        self.ended_by_failure = self.closing = False
        self._records: list[WorkerRecord] = []
        self._events: deque[Event] = deque()  # received, and not yet handled
        self._batches: deque[tuple[WorkerHandle, int]] = deque()
        self._answers: dict[int, Any] = {}  # to the last question, by worker
        self._started = False
        self._next_seed: int | None = None
        self._stop_at: float | None = None
        self._lock = GatherLock()

    @property
    def active_workers(self) -> list[WorkerHandle]:
        """The workers that take part in gathering, by index."""
        return [record.worker for record in self._records if record.worker is not None and record.active]

    def _send(self, worker: WorkerHandle, command: str, argument: Any) -> None:
        """Send a command that has an answer; do nothing if the worker was replaced."""
        record = self._records[worker.worker_idx]
        if record.worker is worker:
            if not record.answers_owed:
                record.waiting_since = time.monotonic()
            record.answers_owed += 1
            self.pool.send(worker, command, argument)

    def _step(self, wait_for_events: bool = True) -> None:
        """Wait for events, and for the next deadline or restart; handle them.

        Raises:
            NotConnected: another thread has raised a failure, or has shut the collector down.
            WorkerDied, WorkerFailed, SyncTimeout: a failure that the policy raises, or ``interrupt``'s time is over.
        """
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

    def _poll(self, timeout: float | None) -> list[Event]:
        """Receive events, to be handled later; none of a worker that has ended and is not handled yet."""
        ended = {event.worker for event in self._events if event.kind in _ENDED}
        workers = [one.worker for one in self._records if one.worker is not None and one.worker not in ended]
        events = self.pool.poll(workers, self._lock.wakeup.fileno(), timeout)
        self._lock.wakeup.clear()
        self._events.extend(events)
        return events

    def _error_of(self, worker: WorkerHandle, patience: float = 0.0) -> FailureCause | None:
        """Return the error that ``worker`` has sent, if it has raised; its event is still to be handled.

        Args:
            worker: the worker.
            patience: seconds to wait for the message of a worker that has not ended.

        Raises:
            NotConnected: another thread has shut the collector down.
        """
        self._require_open()  # ``close`` does not wait for this thread without end
        deadline = time.monotonic() + patience
        while not any(event.worker is worker and event.kind in _ENDED for event in self._events):
            left = 0.0 if wait([worker.sentinel], 0.0) else max(0.0, deadline - time.monotonic())
            if not self._poll(left) and not left:
                break
        errors = (event for event in self._events if event.worker is worker and event.kind in RAISED)
        return next((FailureCause.of(worker.worker_idx, one.kind, one.value) for one in errors), None)

    def _time_left(self) -> float | None:
        """Seconds until the next deadline or restart; None if there is none."""
        limit = self.failure_policy.worker_timeout
        times = [record.waiting_since + limit for record in self._records if record.answers_owed and limit is not None]
        times += [record.restart_at for record in self._records if record.state is WorkerState.RESTART_DUE]
        times += [] if self._stop_at is None else [self._stop_at]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _late(self) -> list[WorkerRecord]:
        now, limit = time.monotonic(), self.failure_policy.worker_timeout
        waiting = [record for record in self._records if record.answers_owed]
        return [] if limit is None else [record for record in waiting if now >= record.waiting_since + limit]

    def _handle_events(self) -> None:
        while self._events:
            event = self._events.popleft()
            record = self._records[event.worker.worker_idx]
            if record.worker is event.worker:  # events of a replaced worker are dropped
                self._handle(record, event)

    def _handle(self, record: WorkerRecord, event: Event) -> None:
        worker, kind, value = event
        record.waiting_since = time.monotonic()
        if kind in ("accepted", "part"):
            return
        record.answers_owed -= 1
        if kind == "batch":
            record.backoff.delivered()
            index: int = value
            record.frames += frames_of(worker.batches[index])
            self._batches.append((worker, index))
        elif kind == "answer":
            self._answers[record.index] = value
        elif kind == "ready":
            record.state, record.num_envs = WorkerState.READY, worker.num_envs
            if self._started:
                self._rejoin(record, worker)
        elif kind == "connected":
            record.state = WorkerState.ACTIVE
            if self._started:
                self.failures.restarted[record.index] += 1
                _log.warning("worker %d has been replaced", record.index)
                self.pool.send(worker, "resume", record.frames)  # its predecessor's random frames are not repeated
                self._seed_restarted(worker)
        else:
            self._fail(record, FailureCause.of(record.index, kind, value), final=kind == "unplaced")

    def _build(self, record: WorkerRecord) -> None:
        assert record.worker is not None
        self._send(record.worker, "build", (record.spec, record.options))

    def _connect(self, record: WorkerRecord) -> None:
        assert record.worker is not None
        record.state = WorkerState.CONNECTING
        self._send(record.worker, "connect", list(self.schemes))

    # --- failures and restarts ---

    def _fail(self, record: WorkerRecord, cause: FailureCause, *, final: bool = False) -> None:
        """Apply the failure policy to a worker: raise, drop it, or schedule its restart; raise if it is `final`."""
        index = record.index
        if final or not self._started or self.failure_policy.on_failure == "raise":
            self.failures.failed |= Counter([index])  # an update may have counted this failure already
            self.ended_by_failure = True
            raise cause.error()
        self.failures.failed[index] += 1
        worker, record.worker, record.answers_owed = record.worker, None, 0
        if worker is not None:
            self.pool.discard(worker)  # before the schemes: a stopped process could still be within an update
            for scheme in self.schemes.values():
                scheme.disconnect(index)
        if self.failure_policy.on_failure == "drop":
            done = self._drop(record, cause)
        else:
            done = self._schedule_restart(record, cause)
        _log.warning("%s: %s", cause.summary, done)
        if cause.raised:
            _log.warning("worker %d raised:\n%s", index, cause.detail)

    def _drop(self, record: WorkerRecord, cause: FailureCause) -> str:
        record.state = WorkerState.DROPPED
        self.failures.dropped[record.index] += 1
        left = [other.index for other in self._records if other.state is not WorkerState.DROPPED]
        if not left:
            self.ended_by_failure = True
            raise cause.error("no worker is left; the last one: ")
        return f"it is dropped, and {left} go on"

    def _schedule_restart(self, record: WorkerRecord, cause: FailureCause) -> str:
        pause = record.backoff.failed()
        if pause is None:
            self.ended_by_failure = True
            window = f"{self.failure_policy.restart_window:g} s"
            often = f"more than {self.failure_policy.max_restarts} times within {window} or since its last batch"
            raise cause.error(f"worker {record.index} has failed {often}; the last time: ")
        record.state, record.restart_at = WorkerState.RESTART_DUE, time.monotonic() + pause
        return f"a new process is started in {pause:g} s"

    def _restart(self, record: WorkerRecord) -> None:
        try:
            record.worker = self.pool.start_worker(record.index)
        except OSError as error:
            self._fail(record, FailureCause(wsync.WorkerDied, record.index, f"could not be restarted: {error}"))
            return
        record.state = WorkerState.BUILDING
        self._build(record)

    def _rejoin(self, record: WorkerRecord, worker: WorkerHandle) -> None:
        """Let a restarted worker join every scheme, while the trainer waits: usually some milliseconds."""
        self._connect(record)
        index = record.index
        try:
            for scheme in self.schemes.values():
                timeout = None if scheme.timeout is None else max(_REJOIN_TIMEOUT, scheme.timeout)
                scheme.readmit(index, worker.process or worker, timeout)
        except (wsync.WeightSyncError, OSError) as error:
            own = self._error_of(worker)  # the better cause
            self._fail(record, own or FailureCause(wsync.WorkerDied, index, f"could not rejoin: {error}"))

    def _seed_restarted(self, worker: WorkerHandle) -> None:
        """Seed a restarted worker with an unused seed, so that it does not repeat its predecessor's episodes."""
        seed = secrets.randbits(31) if self._next_seed is None else self._next_seed
        if self._next_seed is not None:
            self._next_seed += worker.num_envs
        self.pool.send(worker, "seed", seed)
