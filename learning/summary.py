"""How a run ended: the content of ``summary.json``, and a verdict in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from learning.progress import WINDOW, Progress

if TYPE_CHECKING:
    from wsync import SyncMetrics


class Failures(Protocol):
    """How often workers have failed; false if none has. In words, too."""

    def as_dict(self) -> dict[str, dict[str, int]]:
        """By what was done, and by worker."""
        ...


def summarise(
    status: str,
    progress: Progress,
    solved_at: float | None,
    metrics: SyncMetrics,
    failures: Failures | None = None,
    chaos: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return what ``summary.json`` holds of every run.

    Args:
        status: "solved", "finished" (`total_frames` were collected), "interrupted" or "failed".
        progress: the counters.
        solved_at: mean return that counts as solved; None: nothing does.
        metrics: what the updates cost.
        failures: of workers; None where there are no workers.
        chaos: how many workers each fault has hit that was made on purpose.
    """
    sync = metrics.summary()
    sync.setdefault("latency_us", dict.fromkeys(("p50", "p95", "p99", "max")))
    sync.setdefault("phases_us", {})
    told = [verdict(status, progress, solved_at)]
    told += [f"{failures}."] if failures else []
    told += [f"Made on purpose: {_listed(chaos)}."] if chaos and any(chaos.values()) else []
    return {
        "status": status,
        "solved": progress.solved(solved_at),
        "verdict": " ".join(told),
        "frames": progress.frames,
        "seconds": progress.seconds,
        "frames_per_second": progress.frames_per_second,
        "episodes": progress.episodes,
        "episode_return_mean_100": progress.return_mean,
        "solved_at": solved_at,
        "weight_sync": {**sync, "version": progress.version, "staleness_mean": progress.staleness_mean},
        "worker_failures": failures.as_dict() if failures else {},
        "chaos": dict(chaos or {}),
    }


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} × {what}" for what, count in counts.items())


_WAYS_ON = {"solved": "stop_when_solved=false", "finished": "More total_frames="}
"""How a run that has come to such an end, and is resumed, has something to do."""


def verdict(status: str, progress: Progress, solved_at: float | None) -> str:
    """Say how the run ended, in a sentence; in two if it was a control: nothing (version 0) reached the workers."""
    if status in _WAYS_ON and progress.frames == progress.frames_before:
        return f"Nothing was left to do: {status} after {progress.frames:,} frames. {_WAYS_ON[status]} goes on."
    mean, count, solved = progress.return_mean, len(progress.window), progress.solved(solved_at)
    how = {"solved": "Solved", "finished": "Finished"}.get(status, status.capitalize())
    if solved_at is not None and status != "solved":
        how += ", solved," if solved else ", not solved,"
    text = f"{how} after {progress.frames:,} frames in {progress.seconds:.1f} s: "
    text += "no episode ended" if mean is None else f"mean return {mean:.1f} over the last {count} episodes"
    text += "" if solved_at is None else f" (solved at {solved_at:g})"
    return f"{text}." if progress.version or progress.acted_on is None else f"{text}. {_control(progress, solved)}"


def _control(progress: Progress, solved: bool) -> str:
    """Say what it means that workers, who had nothing but what they began with (``weight_sync=none``), came to this."""
    mean, first = progress.return_mean, progress.first_mean
    text = "Nothing reached the workers: all their frames were acted with version 0"
    if solved:
        return f"{text}. And yet it was solved: the task needs no learning, or storage is shared by accident."
    if mean is None or first is None or progress.episodes < 2 * WINDOW:
        return f"{text}, and it did not learn."
    return f"{text}, and it did not learn: mean return {first:.1f} at the start, {mean:.1f} at the end."
