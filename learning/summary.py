"""What is written at the end of a run: ``summary.json``, and how the run ended in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from learning.progress import WINDOW, Progress

if TYPE_CHECKING:
    from wsync import SyncMetrics


class Failures(Protocol):
    """Counts of worker failures; false if there were none. ``str`` gives them in words."""

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return ``{what was done: {worker: count}}``."""
        ...


class Limits(Protocol):
    """How far workers may run ahead and fall behind, and what was dropped; ``collectors.staleness.Staleness``."""

    max_staleness: int | None
    run_ahead: int
    dropped_batches: int
    dropped_frames: int


def summarise(
    status: str,
    progress: Progress,
    solved_at: float | None,
    metrics: SyncMetrics,
    failures: Failures | None = None,
    chaos: Mapping[str, int] | None = None,
    limits: Limits | None = None,
) -> dict[str, Any]:
    """Return the content of ``summary.json``.

    Args:
        status: "solved", "finished" (`total_frames` were collected), "interrupted" or "failed".
        progress: the counters.
        solved_at: mean return that counts as solved; None if the environment has none.
        metrics: cost of the updates.
        failures: failures of workers; None if there are no workers.
        chaos: number of injected faults of each kind.
        limits: of the collector.
    """
    sync = metrics.summary()
    sync.setdefault("latency_us", dict.fromkeys(("p50", "p95", "p99", "max")))
    sync.setdefault("phases_us", {})
    sentences = [verdict(status, progress, solved_at)]
    sentences += [f"{failures}."] if failures else []
    if chaos and any(chaos.values()):
        counts = ", ".join(f"{count} × {fault}" for fault, count in chaos.items())
        sentences.append(f"Made on purpose: {counts}.")
    return {
        "status": status,
        "solved": progress.solved(solved_at),
        "verdict": " ".join(sentences),
        "frames": progress.frames,
        "seconds": progress.seconds,
        "frames_per_second": progress.frames_per_second,
        "episodes": progress.episodes,
        "episode_return_mean_100": progress.return_mean,
        "solved_at": solved_at,
        "weight_sync": {**sync, "version": progress.version},
        "staleness": {
            "mean": progress.staleness_mean,
            "max": progress.staleness_max,
            "max_staleness": limits and limits.max_staleness,
            "run_ahead": limits and limits.run_ahead,
            "dropped_batches": progress.dropped_batches,
            "dropped_frames": progress.dropped_frames,
        },
        "worker_failures": failures.as_dict() if failures else {},
        "chaos": dict(chaos or {}),
    }


_TO_CONTINUE = {"solved": "Set stop_when_solved=false to continue.", "finished": "Raise total_frames to continue."}
"""Advice for a resumed run that has already reached its goal, by status."""


def verdict(status: str, progress: Progress, solved_at: float | None) -> str:
    """Return how the run ended, in a sentence; with a second one if the workers never received an update."""
    if status in _TO_CONTINUE and progress.frames == progress.frames_before:
        return f"Nothing was left to do: {status} after {progress.frames:,} frames. {_TO_CONTINUE[status]}"
    mean, count, solved = progress.return_mean, len(progress.window), progress.solved(solved_at)
    how = {"solved": "Solved", "finished": "Finished"}.get(status, status.capitalize())
    if solved_at is not None and status != "solved":
        how += ", solved," if solved else ", not solved,"
    text = f"{how} after {progress.frames:,} frames in {progress.seconds:.1f} s: "
    text += "no episode ended" if mean is None else f"mean return {mean:.1f} over the last {count} episodes"
    text += "" if solved_at is None else f" (solved at {solved_at:g})"
    return f"{text}." if progress.version or progress.acted_on is None else f"{text}. {_control(progress, solved)}"


def _control(progress: Progress, solved: bool) -> str:
    """Return the verdict on a run in which the workers kept their first weights (``weight_sync=none``)."""
    mean, first = progress.return_mean, progress.first_mean
    text = "Nothing reached the workers: version 0 acted in all frames"
    if solved:
        return f"{text}. It was solved all the same: the task needs no learning, or storage is shared by accident."
    if mean is None or first is None or progress.episodes < 2 * WINDOW:
        return f"{text}, and it did not learn."
    return f"{text}, and it did not learn: mean return {first:.1f} at the start, {mean:.1f} at the end."
