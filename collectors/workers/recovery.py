"""What is done about a worker that died, raised or did not answer: raise, go on without it, or start it anew."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from wsync import SyncTimeout, WorkerDied, WorkerFailed

OnFailure = Literal["raise", "drop", "restart"]
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds before a worker is started anew; doubled by each failure in a row


@dataclass(frozen=True)
class FailurePolicy:
    """What is done about a worker that failed.

    Attributes:
        on_failure: ``"raise"``; ``"drop"``: go on without it; ``"restart"``: go on, and start it anew.
        worker_timeout: seconds in which a worker has to answer; one that does not has failed. None: no limit.
        max_restarts: a worker that fails more often than this within ``restart_window``, or since its last batch, is an
            error after all.
        restart_window: seconds.

    Raises:
        ValueError: numbers out of range, or another word.
    """

    on_failure: OnFailure = "raise"
    worker_timeout: float | None = 600.0
    max_restarts: int = 10
    restart_window: float = 60.0

    def __post_init__(self) -> None:
        """Check."""
        if self.on_failure not in get_args(OnFailure):
            raise ValueError(f"on_worker_failure is one of {', '.join(get_args(OnFailure))}, not {self.on_failure!r}")
        if self.worker_timeout is not None and self.worker_timeout <= 0:
            raise ValueError(f"worker_timeout is a number of seconds above 0, or None, not {self.worker_timeout}")
        if self.max_restarts < 0 or self.restart_window <= 0:
            raise ValueError("max_restarts is at least 0, and restart_window a number of seconds above 0")


@dataclass
class Failures:
    """How often workers have failed, and what was done about it; each by worker.

    Attributes:
        failed: how often it died, raised or did not answer.
        dropped: 1 for one that was let go.
        restarted: how often it was started anew (which may have failed again).
    """

    failed: Counter[int] = field(default_factory=Counter)
    dropped: Counter[int] = field(default_factory=Counter)
    restarted: Counter[int] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, dict[str, int]]:
        """For a JSON file: ``{"failed": {"1": 2}, …}``."""
        return {name: {str(w): n for w, n in sorted(counts.items())} for name, counts in vars(self).items()}

    def __bool__(self) -> bool:
        """Whether there were any."""
        return bool(self.failed)

    def __str__(self) -> str:
        """In a few words."""
        done = [(self.dropped.total(), "dropped"), (self.restarted.total(), "restarted")]
        more = "".join(f", {count} {what}" for count, what in done if count)
        return f"{self.failed.total()} worker failure(s){more}"


@dataclass(frozen=True)
class Cause:
    """Why a worker has failed.

    Attributes:
        kind: the error that says so.
        message: of it; names the worker.
        detail: for the error's ``workers``; a traceback, if it raised.
    """

    kind: type[WorkerDied] | type[WorkerFailed] | type[SyncTimeout]
    message: str
    detail: str

    @classmethod
    def of(cls, worker_idx: int, kind: str, answer: Any) -> Cause:
        """What a worker's ``error``, ``stalled`` or ``died`` means."""
        if kind == "error":
            return cls(WorkerFailed, f"worker {worker_idx} failed:\n{answer}", answer)
        if kind == "stalled":
            return cls(SyncTimeout, f"worker {worker_idx} {answer}", answer)
        return cls(WorkerDied, f"worker {worker_idx} {answer}", answer)

    def error(self, worker_idx: int, preface: str = "") -> WorkerDied | WorkerFailed | SyncTimeout:
        """The error to raise."""
        return self.kind(preface + self.message, {worker_idx: self.detail})

    @property
    def line(self) -> str:
        """In one line: of a traceback, the last one."""
        first, _, rest = self.message.partition("\n")
        last = rest.strip().rpartition("\n")[2]
        return f"{first} {last}".rstrip()


class RestartBackoff:
    """When a worker is started anew, and when it has failed too often.

    Args:
        failure_policy: says how often is too often.
    """

    def __init__(self, failure_policy: FailurePolicy) -> None:
        self._failure_policy = failure_policy
        self._failed: deque[float] = deque()
        self._in_a_row = 0
        self._pause = _FIRST_PAUSE

    def failed(self) -> float | None:
        """It has failed: the seconds after which it is started anew; None if that was too often."""
        now = time.monotonic()
        self._failed.append(now)
        self._in_a_row += 1  # one that fails slowly, but never delivers, would not be told by the window
        while self._failed[0] < now - self._failure_policy.restart_window:
            self._failed.popleft()
        if max(len(self._failed), self._in_a_row) > self._failure_policy.max_restarts:
            return None
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        return pause

    def delivered(self) -> None:
        """It has delivered a batch: it is well."""
        self._in_a_row, self._pause = 0, _FIRST_PAUSE
