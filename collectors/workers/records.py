"""The state of each worker index, the failure policy, and how often workers have failed.

States of a worker index::

    BUILDING ──ready──▶ READY ──connect──▶ CONNECTING ──connected──▶ ACTIVE

A worker that dies, raises or does not answer leaves these states. Once all workers have been active:

    on_worker_failure=restart   RESTART_DUE ──after a pause──▶ BUILDING
    on_worker_failure=drop      DROPPED, final
    on_worker_failure=raise     the failure is raised; so is any failure before all workers have been active
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal, get_args

from collectors.worker import WorkerOptions
from collectors.workers.pool import WorkerHandle
from wsync import SyncTimeout, WorkerDied, WorkerFailed

OnFailure = Literal["raise", "drop", "restart"]
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds before a restart; doubled by each failure in a row


@dataclass(frozen=True)
class FailurePolicy:
    """What happens when a worker fails; ``WorkerCollector`` documents the settings.

    Raises:
        ValueError: a number is out of range, or ``on_failure`` is none of the three.
    """

    on_failure: OnFailure = "raise"
    worker_timeout: float | None = 600.0
    max_restarts: int = 10

    def __post_init__(self) -> None:
        if self.on_failure not in get_args(OnFailure):
            raise ValueError(f"on_worker_failure is one of {', '.join(get_args(OnFailure))}, not {self.on_failure!r}")
        if self.worker_timeout is not None and not 0 < self.worker_timeout < math.inf:
            limit = "a finite number of seconds above 0, or None for no limit"
            raise ValueError(f"worker_timeout is {limit}, not {self.worker_timeout}")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts is at least 0, not {self.max_restarts}")


@dataclass
class Failures:
    """How often workers have failed, by worker index."""

    failed: Counter[int] = field(default_factory=Counter)  # deaths, errors and missed deadlines
    dropped: Counter[int] = field(default_factory=Counter)
    restarted: Counter[int] = field(default_factory=Counter)  # replacements that have joined

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return the counts for a JSON file: ``{"failed": {"1": 2}, …}``."""
        return {name: {str(w): n for w, n in sorted(counts.items())} for name, counts in vars(self).items()}

    def __bool__(self) -> bool:
        return bool(self.failed)

    def __str__(self) -> str:
        done = [(self.dropped.total(), "dropped"), (self.restarted.total(), "restarted")]
        more = "".join(f", {count} {what}" for count, what in done if count)
        return f"{self.failed.total()} worker failure(s){more}"


@dataclass(frozen=True)
class FailureCause:
    """Why a worker has failed; ``detail`` is its traceback if it raised, else text to follow "worker 3 "."""

    kind: type[WorkerDied] | type[WorkerFailed] | type[SyncTimeout]
    worker: int
    detail: str

    @property
    def message(self) -> str:
        """The text of the error, which names the worker."""
        raised = issubclass(self.kind, WorkerFailed)
        return f"worker {self.worker} failed:\n{self.detail}" if raised else f"worker {self.worker} {self.detail}"

    def error(self, preface: str = "") -> WorkerDied | WorkerFailed | SyncTimeout:
        """Return the error to raise."""
        return self.kind(preface + self.message, {self.worker: self.detail})


class WorkerState(Enum):
    """The states in the module's docstring."""

    BUILDING = auto()
    READY = auto()
    CONNECTING = auto()
    ACTIVE = auto()
    RESTART_DUE = auto()
    DROPPED = auto()


@dataclass(eq=False)
class WorkerRecord:
    """The state of one worker index, over all workers that have had it. Times are of ``time.monotonic``."""

    options: WorkerOptions  # of the current worker and its successors
    spec: bytes  # the pickled ``WorkerSpec``; empty once there can be no successor
    failure_policy: FailurePolicy
    worker: WorkerHandle | None
    state: WorkerState = WorkerState.BUILDING
    answers_owed: int = 0
    waiting_since: float = 0.0  # when the worker last answered, or began to owe an answer
    restart_at: float = 0.0
    num_envs: int = 0
    frames: int = 0  # collected in all, also in batches that were dropped; including those of an earlier run
    failures_in_a_row: int = 0

    @property
    def index(self) -> int:
        """The worker index."""
        return self.options.worker_idx

    @property
    def deadline(self) -> float:
        """When the worker has to have answered."""
        limit = self.failure_policy.worker_timeout
        return math.inf if limit is None else self.waiting_since + limit

    @property
    def active(self) -> bool:
        """Whether a worker with this index takes part in gathering."""
        return self.state is WorkerState.ACTIVE

    @property
    def gets_updates(self) -> bool:
        """Whether an update for all workers goes to this one: it has joined the schemes."""
        return self.state in (WorkerState.CONNECTING, WorkerState.ACTIVE)

    def pause_before_restart(self) -> float | None:
        """Count a failure; return the seconds until the restart, or None if the limit is exceeded."""
        self.failures_in_a_row += 1
        if self.failures_in_a_row > self.failure_policy.max_restarts:
            return None
        return min(_FIRST_PAUSE * 2 ** (self.failures_in_a_row - 1), _LONGEST_PAUSE)
