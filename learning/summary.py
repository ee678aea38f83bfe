"""What is written at the end of a run: ``summary.json``, and how the run ended in a sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from collectors.batches import Staleness
from collectors.workers.records import Failures
from learning.progress import Progress
from wsync import SyncMetrics
from wsync.metrics import PHASES, ledger

_NO_UPDATE: dict[str, Any] = {  # the figures of a weight sync without updates
    "latency_us": dict.fromkeys(("p50", "p95", "p99", "max")),
    "phases_us": dict.fromkeys(PHASES),
    **dict.fromkeys(("seconds", "share", "age", "plain_copy_us", "over_plain_copy")),
}
# Advice for a resumed run that has already reached its goal, by status.
_TO_CONTINUE = {"solved": "Set stop_when_solved=false to continue.", "finished": "Raise total_frames to continue."}


def summarise(
    status: str,
    progress: Progress,
    solved_at: float | None,
    metrics: SyncMetrics,
    failures: Failures,
    limits: Staleness,
) -> dict[str, Any]:
    """Return the content of ``summary.json``.

    `progress` counts the whole run; the cost of updates and the `failures` of workers are those since a resume.
    `status` is "solved", "finished", "interrupted" or "failed".
    """
    sync = {**_NO_UPDATE, **metrics.summary(), "version": progress.version}
    if metrics.updates < 100:  # it would be their maximum
        sync["latency_us"] = {**sync["latency_us"], "p99": None}
    sentences = [verdict(status, progress, solved_at), *([f"{failures}."] if failures else [])]
    return {
        "status": status,
        "solved": progress.solved_after is not None,
        "solved_after_frames": progress.solved_after,
        "verdict": " ".join(sentences),
        "frames": progress.frames,
        "seconds": progress.seconds,
        "frames_per_second": progress.frames_per_second,
        "seconds_learning": progress.seconds_learning,
        "episodes": progress.episodes,
        "episode_return_mean_100": progress.return_mean,
        "solved_at": solved_at,
        "weight_sync": sync,
        "staleness": {
            "mean": progress.versions_behind / max(progress.acted_frames, 1),
            "max": progress.staleness_max,
            "max_staleness": limits.max_staleness,
            "run_ahead": limits.run_ahead,
            "dropped_batches": progress.dropped_batches,
            "dropped_frames": progress.dropped_frames,
        },
        "ledger": ledger(),
        "worker_failures": failures.as_dict() if failures else {},
    }


def summary_without_frames() -> dict[str, Any]:
    """Return the summary of a run that has done nothing; it has every entry that others have."""
    return summarise("finished", Progress(), None, SyncMetrics(""), Failures(), Staleness())


def verdict(status: str, progress: Progress, solved_at: float | None) -> str:
    """Return how the run ended, in a sentence; with a second one if the workers never received an update."""
    if status in _TO_CONTINUE and progress.frames == progress.frames_before:
        return f"Nothing was left to do: {status} after {progress.frames:,} frames. {_TO_CONTINUE[status]}"
    mean, count, reached = progress.return_mean, len(progress.window), progress.solved_after
    text = f"{status.capitalize()} after {progress.frames:,} frames in {progress.seconds:.1f} s: "
    mean_return = f"mean return {return_text(mean, solved_at)} over the last {count} episodes"
    text += "no episode ended" if mean is None else mean_return
    if solved_at is not None:
        text += f"; {solved_at:g} counts as solved"
        if status != "solved":
            text += ", and was not reached" if reached is None else f", first reached after {reached:,} frames"
    if not progress.version and progress.acted_frames:  # weight_sync=none
        text += ". Nothing reached the workers: version 0 acted in all frames"
        text += ", and it did not learn" if reached is None else "; it was solved all the same: is storage shared?"
    return f"{text}."


def return_text(value: float | None, solved_at: float | None = None) -> str:
    """Write a return with three significant digits of `solved_at`, or of itself, and one decimal at least."""
    if value is None:
        return "–"
    scale = abs(solved_at or value)
    decimals = 2 - math.floor(math.log10(scale)) if 0 < scale < math.inf else 1
    return f"{value:,.{min(max(decimals, 1), 6)}f}"


def objective_of(summary: Mapping[str, Any], name: str) -> float:
    """Return the figure of a run that a sweeper compares; NaN if the run has none (no episode has ended).

    `name` is that of a number in ``summary.json``; ``weight_sync.latency_us.p50`` is inside others. Raises ValueError
    if there is no such entry, or it is not a number.
    """
    value: Any = summary
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            there = ", ".join(value) if isinstance(value, Mapping) else "none"
            raise ValueError(f"objective={name}: the summary has no '{part}' there; entries: {there}")
        value = value[part]
    if value is None:
        return math.nan
    if not isinstance(value, int | float):
        raise ValueError(f"objective={name}: the entry of the summary is not a number, but {value!r}")
    return float(value)
