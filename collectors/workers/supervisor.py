"""Workers begin, speak, fail, and have successors (the states are in ``place.py``): the inside of ``members.py``."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from typing import Any, Generic

import wsync
from collectors.workers.place import Place, W, WorkerState
from collectors.workers.pool import Event, Pool
from collectors.workers.recovery import Cause, FailurePolicy, Failures
from collectors.workers.turns import Turns

_ENDS = ("error", "stalled", "died")
_JOIN = 10.0  # seconds in which a successor that is ready has to have joined a scheme: the trainer waits for that
_log = logging.getLogger(__name__)


@dataclass
class Supervisor(Generic[W]):
    """All workers' places, and what is done when a worker fails.

    Attributes:
        pool: of workers that have begun, and have nothing to act with yet.
        failure_policy: what is done about failures.
        schemes: those that successors join.
        failures: what has happened so far.
        over: whether a failure was raised; nobody should go on then.
    """

    pool: Pool[W]
    failure_policy: FailurePolicy
    schemes: Mapping[str, wsync.WeightSyncScheme]
    failures: Failures = field(default_factory=Failures)
    over: bool = False

    def __post_init__(self) -> None:
        """Nobody has a place yet."""
        self.pool.patience = self.failure_policy.worker_timeout
        self._places: list[Place[W]] = []
        self._events: deque[Event[W]] = deque()
        self._batches: deque[tuple[W, int]] = deque()
        self._started = False
        self._next_seed: int | None = None
        self._stop_at: float | None = None
        self._turns = Turns()

    @property
    def there(self) -> list[W]:
        """The workers that take part now, by index."""
        return [place.worker for place in self._places if place.worker is not None and place.state is WorkerState.THERE]

    def _tell(self, worker: W, command: str, argument: Any) -> None:
        place = self._places[worker.worker_idx]
        if place.worker is worker:
            if not place.due:
                place.since = time.monotonic()
            place.due += 1
            self.pool.tell([worker], command, argument)

    def _step(self, at_once: bool = False) -> None:
        """Wait until something happens, and do what is to be done about it."""
        if self.over:
            raise wsync.NotConnected("a worker's failure was raised in another thread, and has ended this collector")
        for place in self._places:
            if place.state is WorkerState.PAUSED and place.begins_at <= time.monotonic():
                self._begin(place)
        self._listen(0.0 if at_once or self._events else self._patience())
        self._attend()
        # That may have taken seconds, in which whoever seems to be late by now has answered.
        while (late := self._late()) and self._listen(0.0):
            self._attend()
        for place in late:
            index, detail = place.options.worker_idx, f"did not answer within {self.failure_policy.worker_timeout:g} s"
            self._fail(place, Cause(wsync.SyncTimeout, f"worker {index} {detail}", detail))
        if self._stop_at is not None and time.monotonic() >= self._stop_at and not self._batches:
            raise wsync.SyncTimeout("asked to stop, and the batch under way is not complete")

    def _listen(self, timeout: float | None) -> list[Event[W]]:
        """What anybody says, which is to be attended to."""
        events = self.pool.listen([p.worker for p in self._places if p.worker is not None], self._turns.wake, timeout)
        self._turns.come()
        self._events.extend(events)
        return events

    def _hear_out(self, worker: W, patience: float = 0.0) -> str | None:
        """Listen to what a worker has said, to be attended to later; its traceback, if it has raised.

        Args:
            worker: still there, as far as is known.
            patience: seconds in which one that has not ended may yet say how it will.
        """
        deadline = time.monotonic() + patience
        while not any(one is worker and kind in _ENDS for one, kind, _ in self._events):
            left = 0.0 if wait([worker.sentinel], 0.0) else max(0.0, deadline - time.monotonic())
            if not self._listen(left) and not left:
                break
        return next((answer for one, kind, answer in self._events if one is worker and kind == "error"), None)

    def _attend(self) -> None:
        while self._events:
            worker, kind, answer = self._events.popleft()
            place = self._places[worker.worker_idx]
            if place.worker is worker:  # else it is what a predecessor said
                self._take(place, worker, kind, answer)

    def _patience(self) -> float | None:
        """Seconds until something has to be done, though nobody says anything."""
        limit = self.failure_policy.worker_timeout
        times = [place.since + limit for place in self._places if place.due and limit is not None]
        times += [place.begins_at for place in self._places if place.state is WorkerState.PAUSED]
        times += [] if self._stop_at is None else [self._stop_at]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _take(self, place: Place[W], worker: W, kind: str, answer: Any) -> None:
        place.due -= 1
        place.since = time.monotonic()
        if kind == "batch":
            place.backoff.delivered()
            place.frames += worker.frames
            self._batches.append((worker, answer))
        elif kind == "ready":
            place.state, place.num_envs = WorkerState.READY, worker.num_envs
            if self._started:
                self._readmit(place, worker)
        elif kind == "connected":
            place.state, place.gets_updates = WorkerState.THERE, True
            if self._started:
                self._seed_anew(worker)
        else:
            self._fail(place, Cause.of(worker.worker_idx, kind, answer))

    def _late(self) -> list[Place[W]]:
        """Those who owe an answer for too long."""
        now, limit = time.monotonic(), self.failure_policy.worker_timeout
        return [place for place in self._places if limit is not None and place.due and now >= place.since + limit]

    # --- failures and successors ---

    def _fail(self, place: Place[W], cause: Cause) -> None:
        """A worker has failed: raise, or let it go and say what is done."""
        index = place.options.worker_idx
        if not self._started or self.failure_policy.on_failure == "raise":
            self.failures.failed |= Counter([index])  # once: an update may have come upon it before
            self.over = True
            raise cause.error(index)
        self.failures.failed[index] += 1
        worker, place.worker, place.due, place.gets_updates = place.worker, None, 0, False
        if worker is not None:
            self.pool.let_go(worker)  # first: one that is stopped may be in the midst of something
            for scheme in self.schemes.values():
                scheme.dismiss(index)
        done = self._drop(place, cause) if self.failure_policy.on_failure == "drop" else self._pause(place, cause)
        _log.warning("%s: %s", cause.line, done)
        if cause.kind is wsync.WorkerFailed:
            _log.warning("what worker %d raised:\n%s", index, cause.detail)

    def _drop(self, place: Place[W], cause: Cause) -> str:
        index, place.state = place.options.worker_idx, WorkerState.DROPPED
        self.failures.dropped[index] += 1
        left = [other.options.worker_idx for other in self._places if other.state is not WorkerState.DROPPED]
        if not left:
            self.over = True
            raise cause.error(index, "no worker is left; the last one: ")
        return f"it is dropped, and {left} go on"

    def _pause(self, place: Place[W], cause: Cause) -> str:
        index, pause = place.options.worker_idx, place.backoff.failed()
        if pause is None:
            self.over = True
            window = f"{self.failure_policy.restart_window:g} s"
            often = f"more than {self.failure_policy.max_restarts} times within {window} or since its last batch"
            raise cause.error(index, f"worker {index} has failed {often}; the last time: ")
        place.state, place.begins_at = WorkerState.PAUSED, time.monotonic() + pause
        return f"it is started anew in {pause:g} s"

    def _begin(self, place: Place[W]) -> None:
        index = place.options.worker_idx
        try:
            place.worker = self.pool.begin(index)
        except OSError as error:
            detail = f"could not be started anew: {error}"
            self._fail(place, Cause(wsync.WorkerDied, f"worker {index} {detail}", detail))
            return
        self.failures.restarted[index] += 1
        place.state = WorkerState.BUILDING
        self._build(place)

    def _build(self, place: Place[W]) -> None:
        assert place.worker is not None
        left = max(0, place.options.init_random_frames - place.frames)
        self._tell(place.worker, "build", (place.parts, replace(place.options, init_random_frames=left)))

    def _connect(self, place: Place[W]) -> None:
        assert place.worker is not None
        place.state = WorkerState.JOINING
        self._tell(place.worker, "connect", None)

    def _readmit(self, place: Place[W], worker: W) -> None:
        """Have a successor join every scheme: the trainer waits for that, some milliseconds."""
        self._connect(place)
        index = worker.worker_idx
        try:
            for scheme in self.schemes.values():
                scheme.readmit(index, worker.sentinel, _JOIN)
        except (wsync.WeightSyncError, OSError) as error:
            raised = self._hear_out(worker)  # what it says itself is the better cause
            cause = Cause(wsync.WorkerDied, f"worker {index} could not join again: {error}", str(error))
            self._fail(place, cause if raised is None else Cause.of(index, "error", raised))
            return
        place.gets_updates = True  # from here on it gets every update

    def _seed_anew(self, worker: W) -> None:
        """A seed that nobody has had; a successor must not go through its predecessor's episodes again."""
        seed = secrets.randbits(31) if self._next_seed is None else self._next_seed
        if self._next_seed is not None:
            self._next_seed += worker.num_envs
        self.pool.tell([worker], "seed", seed)
