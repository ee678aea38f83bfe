"""What a run has reached so far: counters, returns, staleness; a row of figures for each batch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from wsync.metrics import percentile

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from wsync import SyncMetrics, SyncReport

WINDOW = 100  # episodes in the mean that says whether an environment is solved
RECENT = 1000  # updates in a row's percentiles; the summary's are over all of them


@dataclass(frozen=True)
class SyncRow:
    """What the weight sync after one batch cost, times in microseconds; the percentiles are over recent updates."""

    latency_us: float
    p50_us: float
    p95_us: float
    p99_us: float
    bytes: int
    gib_per_second: float
    phases_us: Mapping[str, float]

    @classmethod
    def of(cls, report: SyncReport, recent_us: Sequence[float]) -> SyncRow:
        """Take the figures from the report of one update; `recent_us` are recent latencies, this one's included."""
        return cls(
            latency_us=report.seconds * 1e6,
            p50_us=percentile(recent_us, 0.5),
            p95_us=percentile(recent_us, 0.95),
            p99_us=percentile(recent_us, 0.99),
            bytes=report.bytes,
            gib_per_second=report.bytes / 2**30 / max(report.seconds, 1e-9),
            phases_us={phase: seconds * 1e6 for phase, seconds in report.phases.items()},
        )


@dataclass(frozen=True)
class Row:
    """One turn of the loop: a batch collected, learnt from, and the weights sent. A line of ``metrics.jsonl``.

    Attributes:
        frames: collected since the run began (the first one, if it was resumed).
        seconds: since the first environment step, interruptions not counted.
        frames_per_second: of this process, since its first environment step.
        episodes: ended so far.
        episode_return_mean_100: over the last 100 episodes, or all while there are fewer; None before the first.
        episode_returns: of the episodes that ended in this batch, in the order of time.
        version: of the weights last sent; each process counts from 1, that of a resumed run, too.
        staleness: how many versions the batch's frames were behind when they were learnt from, mean over frames.
        weight_sync: what the update cost; None where there was none.
        learning: the learner's figures.
    """

    frames: int
    seconds: float
    frames_per_second: float
    episodes: int
    episode_return_mean_100: float | None
    episode_returns: Sequence[float]
    version: int
    staleness: float
    weight_sync: SyncRow | None
    learning: Mapping[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON has them."""
        return asdict(self)


@dataclass
class Progress:
    """The counters of a run. `state_dict` and `load_state_dict` carry them into a checkpoint and back."""

    frames: int = 0
    episodes: int = 0
    seconds_before: float = 0.0
    frames_before: int = 0
    acted_frames: int = 0  # not those with random actions
    versions_behind: float = 0.0  # summed over them
    version: int = 0
    window: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    first_mean: float | None = None
    acted_on: tuple[int, int] | None = None  # the oldest and the newest policy version seen in this process's frames
    first_update_at: float | None = None
    _began: float | None = None
    _staleness: float = 0.0
    _returns: Sequence[float] = ()
    _reported: SyncReport | None = None
    _recent_us: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def begin(self, version: int = 0) -> None:
        """Start the clock: the first environment step follows, with `version` of the weights."""
        self._began, self.version = time.perf_counter(), version

    @property
    def seconds(self) -> float:
        """Since the first environment step, summed over resumptions."""
        return self.seconds_before + (0.0 if self._began is None else time.perf_counter() - self._began)

    @property
    def frames_per_second(self) -> float:
        """Of this process."""
        spent = self.seconds - self.seconds_before
        return (self.frames - self.frames_before) / spent if spent > 0 else 0.0

    @property
    def return_mean(self) -> float | None:
        """The mean return of the last 100 episodes, or of all while there are fewer."""
        return float(np.mean(self.window)) if self.window else None

    @property
    def staleness_mean(self) -> float:
        """Over all frames in which a policy acted."""
        return self.versions_behind / self.acted_frames if self.acted_frames else 0.0

    def solved(self, threshold: float | None) -> bool:
        """Whether 100 episodes have reached `threshold` in the mean."""
        mean = self.return_mean
        return threshold is not None and mean is not None and len(self.window) == WINDOW and mean >= threshold

    def collected(self, batch: TensorDictBase, version: int) -> None:
        """Count a batch ``[*B, T]``, about to be learnt from when `version` is the newest that was sent."""
        acted = batch.get("policy_version")
        acted = acted[acted >= 0]  # no policy chose a random frame
        self._staleness = version - float(acted.double().mean()) if acted.numel() else 0.0
        self.versions_behind += self._staleness * acted.numel()
        self.acted_frames += acted.numel()
        if acted.numel():
            oldest, newest = int(acted.min()), int(acted.max())
            before = self.acted_on or (oldest, newest)
            self.acted_on = min(oldest, before[0]), max(newest, before[1])
        self.frames += batch.numel()

        step = batch.get("next")
        done, returns = (step.get(key).movedim(-2, 0) for key in ("done", "episode_return"))  # time first
        self._returns = returns[done].tolist()
        self.episodes += len(self._returns)
        self.window.extend(self._returns)
        if self.first_mean is None and len(self.window) == WINDOW:
            self.first_mean = self.return_mean

    def synchronised(self, learning: Mapping[str, float], metrics: SyncMetrics, version: int) -> Row:
        """Return the row of the batch last counted, once it was learnt from and the new weights were sent."""
        if self.first_update_at is None:
            self.first_update_at = time.perf_counter()
        report, self.version, sync = metrics.last, version, None
        if report is not None and report is not self._reported:  # a send that does not wait is reported later, or never
            self._reported = report
            self._recent_us.append(report.seconds * 1e6)
            sync = SyncRow.of(report, self._recent_us)
        return Row(
            frames=self.frames,
            seconds=self.seconds,
            frames_per_second=self.frames_per_second,
            episodes=self.episodes,
            episode_return_mean_100=self.return_mean,
            episode_returns=self._returns,
            version=version,
            staleness=self._staleness,
            weight_sync=sync,
            learning=learning,
        )

    def forget_returns(self) -> None:
        """Returns so far are of another environment."""
        self.window.clear()
        self.first_mean = None

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as plain values."""
        return {
            "frames": self.frames,
            "episodes": self.episodes,
            "seconds": self.seconds,
            "acted_frames": self.acted_frames,
            "versions_behind": self.versions_behind,
            "version": self.version,
            "window": list(self.window),
            "first_mean": self.first_mean,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from where `state_dict` was taken."""
        self.frames = self.frames_before = state["frames"]
        self.episodes = state["episodes"]
        self.acted_frames, self.versions_behind = state["acted_frames"], state["versions_behind"]
        self.seconds_before, self.version = state["seconds"], state["version"]
        self.window.extend(state["window"])
        self.first_mean = state["first_mean"]
