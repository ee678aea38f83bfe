"""The counters of a run: frames, returns, staleness; and a row of figures for each batch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from collectors.batches import Staleness, frames_of
from wsync import SyncMetrics, SyncReport
from wsync.metrics import percentile

WINDOW = 100  # episodes in the mean return that is compared with the threshold of a solved environment
RECENT = 1000  # updates in a row's percentiles; the summary's are over all of them
_SAVED = (  # counters that a checkpoint has as they are
    *("frames", "episodes", "acted_frames", "versions_behind", "staleness_max", "version", "seconds_learning"),
    *("solved_after", "resumes", "dropped_batches", "dropped_frames"),
)


@dataclass(frozen=True)
class SyncRow:
    """The cost of a batch's last update, times in microseconds; the percentiles are over those of recent batches."""

    latency_us: float
    p50_us: float
    p95_us: float
    p99_us: float | None  # of 100 updates, at least
    bytes: int
    phases_us: Mapping[str, float]


@dataclass(frozen=True)
class Row:
    """One iteration of the loop: a batch collected, learnt from, and the weights sent. A line of ``metrics.jsonl``.

    Attributes:
        frames: collected so far, including those before a resume.
        seconds: since the first environment step, interruptions not counted.
        frames_per_second: `frames` by `seconds`.
        seconds_learning: of `seconds`, those of the learner's updates; in most others the loop waited for a batch.
        episodes: ended so far.
        episodes_in_mean: 100, or all while there are fewer.
        episode_return_mean_100: over these episodes, the last ones; None before the first.
        episode_returns: the returns of the episodes that ended in this batch, in the order of time.
        version: the newest version number, also of an update that failed; a resumed run counts on.
        staleness: versions (with weight_sync=none, updates) from the weights that acted to the learner's, mean.
        staleness_max: the staleness of the oldest frame.
        dropped_batches: workers' batches that were too old to be delivered (``collector.max_staleness``), so far.
        dropped_frames: frames of these.
        weight_sync: cost of the last update for this batch; None if there was none, or a worker failed during it.
        learning: what ``update`` of the algorithm returned, by name, as ``learning.PPO.update`` explains.
        worker_failures: so far, since the last resume.
        resumes: how often the run was resumed so far.
    """

    frames: int
    seconds: float
    frames_per_second: float
    seconds_learning: float
    episodes: int
    episodes_in_mean: int
    episode_return_mean_100: float | None
    episode_returns: Sequence[float]
    version: int
    staleness: float
    staleness_max: int
    dropped_batches: int
    dropped_frames: int
    weight_sync: SyncRow | None
    learning: Mapping[str, float]
    worker_failures: int = 0
    resumes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        return asdict(self)


@dataclass
class Progress:
    """The counters of a run. `state_dict` and `load_state_dict` carry them into a checkpoint and back."""

    frames: int = 0
    episodes: int = 0
    seconds_before: float = 0.0
    seconds_learning: float = 0.0
    frames_before: int = 0
    acted_frames: int = 0  # frames in which the policy acted, not those with random actions
    versions_behind: float = 0.0  # summed over `acted_frames`
    staleness_max: int = 0  # of any frame
    dropped_batches: int = 0  # by the collector, as too old
    dropped_frames: int = 0
    version: int = 0
    window: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    solved_after: int | None = None  # the frames after which the environment was first solved
    resumes: int = 0
    _began: float | None = None
    _dropped_before: tuple[int, int] = (0, 0)  # batches and frames, before a resume
    _batch: Mapping[str, Any] = field(default_factory=dict)  # the figures of a row that are of the last batch alone
    _reported: SyncReport | None = None
    _recent_us: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def begin(self, version: int = 0) -> None:
        """Start the clock, before the first environment step; workers have `version` of the weights."""
        self._began, self.version = time.perf_counter(), version

    @property
    def seconds(self) -> float:
        """Seconds since the first environment step, summed over resumed runs."""
        return self.seconds_before + (0.0 if self._began is None else time.perf_counter() - self._began)

    @property
    def frames_per_second(self) -> float:
        return self.frames / self.seconds if self.seconds > 0 else 0.0

    @property
    def return_mean(self) -> float | None:
        """Mean return of the last 100 episodes, or of all while there are fewer; None before the first."""
        return float(np.mean(self.window)) if self.window else None

    def solved(self, threshold: float | None) -> bool:
        """Whether the last 100 episodes reach `threshold` in the mean."""
        mean = self.return_mean
        return threshold is not None and mean is not None and len(self.window) == WINDOW and mean >= threshold

    def collected(self, batch: TensorDictBase, version: int, limits: Staleness | None = None) -> None:
        """Count a batch ``[*B, T]`` before it is learnt from; `version` is the learner's, which may not have been sent.

        `limits` counts what the collector has dropped in this process.
        Where a batch has a bool "mask" ``[*B, T]``, only its true entries are frames.
        """
        mask, versions = batch.get("mask", None), batch.get("policy_version")
        versions = versions[versions >= 0 if mask is None else (versions >= 0) & mask]  # -1: a random action
        staleness = version - float(versions.double().mean()) if versions.numel() else 0.0
        self.versions_behind += staleness * versions.numel()
        self.acted_frames += versions.numel()
        oldest = version - int(versions.min()) if versions.numel() else 0
        self.staleness_max = max(self.staleness_max, oldest)
        if limits is not None:
            batches, frames = self._dropped_before
            self.dropped_batches, self.dropped_frames = batches + limits.dropped_batches, frames + limits.dropped_frames
        self.frames += frames_of(batch)

        step = batch.get("next")
        done, returns = (step.get(key).movedim(-2, 0) for key in ("done", "episode_return"))  # time first
        ended = returns[done].tolist()
        self.episodes += len(ended)
        self.window.extend(ended)
        self._batch = {"episode_returns": ended, "staleness": staleness, "staleness_max": oldest}

    def synchronised(
        self, learning: Mapping[str, float], metrics: SyncMetrics, version: int, worker_failures: int = 0
    ) -> Row:
        """Return the row of the batch counted last, after it was learnt from and the new weights were sent."""
        report, self.version, sync = metrics.last, version, None
        if report is not None and report is not self._reported:  # a send that does not wait is reported later
            self._reported = report
            (recent := self._recent_us).append(report.seconds * 1e6)
            p50, p95, p99 = (percentile(recent, share) for share in (0.5, 0.95, 0.99))
            phases = {phase: seconds * 1e6 for phase, seconds in report.phases.items()}
            sync = SyncRow(recent[-1], p50, p95, p99 if len(recent) >= WINDOW else None, report.bytes, phases)
        same = ("frames", "seconds", "frames_per_second", "seconds_learning", "episodes", "version", "resumes")
        return Row(
            **{name: getattr(self, name) for name in (*same, "dropped_batches", "dropped_frames")},
            **self._batch,
            episodes_in_mean=len(self.window),
            episode_return_mean_100=self.return_mean,
            weight_sync=sync,
            learning=learning,
            worker_failures=worker_failures,
        )

    def state_dict(self) -> dict[str, Any]:
        counters = {name: getattr(self, name) for name in _SAVED}
        return {**counters, "seconds": self.seconds, "window": list(self.window)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in _SAVED:
            setattr(self, name, state[name])
        self.frames_before, self.seconds_before = self.frames, state["seconds"]
        self._dropped_before = self.dropped_batches, self.dropped_frames
        self.window.extend(state["window"])
        self.resumes += 1
