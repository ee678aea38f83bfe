"""The runs of a sweep: their results, the groups that differ only in the seed, and the figures to compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from learning.reporting.console import microseconds, number
from learning.reporting.files import METRICS, SUMMARY, FolderError, read_rows, read_summary
from learning.summary import return_text


@dataclass(frozen=True)
class Run:
    """One run of a sweep: its folder, the content of ``summary.json``, and its rows."""

    folder: Path
    summary: dict[str, Any]
    rows: Sequence[dict[str, Any]]

    @property
    def sync(self) -> dict[str, Any]:
        """The weight sync part of the summary."""
        return self.summary["weight_sync"]

    @property
    def backend(self) -> str:
        """The scheme's name."""
        return self.sync["scheme"]

    @property
    def complete(self) -> bool:
        """Whether it was solved or finished, rather than interrupted or failed."""
        return self.summary["status"] in ("solved", "finished")

    @property
    def settings(self) -> dict[str, str]:
        """The overrides of its command line, without backend and seed, which have columns of their own."""
        asked = (override.partition("=") for override in self.summary.get("overrides", ()))
        return {name: value for name, _, value in asked if name not in ("weight_sync", "seed")}

    @property
    def seconds_to_solved(self) -> float | None:
        """Seconds from the first step until it was solved for the first time; None if it never was."""
        frames = self.summary.get("solved_after_frames")
        return None if frames is None else next((row["seconds"] for row in self.rows if row["frames"] >= frames), None)

    @property
    def final_return(self) -> float | None:
        """The mean return of the last 100 episodes at the end; None if no episode ended."""
        return self.summary["episode_return_mean_100"]

    @property
    def return_over_run(self) -> float | None:
        """The mean return of the last 100 episodes, averaged over the frames of the run; None if no episode ended."""
        frames = [0, *(row["frames"] for row in self.rows)]
        known = [
            (row["episode_return_mean_100"], after - before)
            for row, (before, after) in zip(self.rows, pairwise(frames), strict=True)
            if row["episode_return_mean_100"] is not None
        ]
        total = sum(frames for _, frames in known)
        return sum(mean * frames for mean, frames in known) / total if total else None


Figure = Callable[[Run], Any]
Column = tuple[Figure, Callable[[Any], str]]
"""A figure, in the units of ``summary.json`` (µs, s), and how it is formatted."""

_DEFAULT = "default"  # of a setting that only other runs' command lines name
FIGURES: dict[str, Column] = {
    "s to solved": (lambda run: run.seconds_to_solved, number),
    "frames to solved": (lambda run: run.summary.get("solved_after_frames"), lambda value: number(value, 0)),
    "return": (lambda run: run.final_return, return_text),
    "frames/s": (lambda run: run.summary["frames_per_second"], lambda value: number(value, 0)),
    "sync p50": (lambda run: run.sync["latency_us"].get("p50"), microseconds),
    "sync p95": (lambda run: run.sync["latency_us"].get("p95"), microseconds),
    "sync p99": (lambda run: run.sync["latency_us"].get("p99"), microseconds),
    "GiB/s": (lambda run: run.sync.get("gib_per_second"), lambda value: number(value, 3)),
    "mean staleness": (lambda run: run.summary["staleness"]["mean"], lambda value: number(value, 2)),
}
"""The figures that have a median."""


def columns(runs: Sequence[Run]) -> dict[str, Column]:
    """Return the columns of a table of ``runs``, including the settings that differ between them."""
    return {
        "backend": (lambda run: run.backend, str),
        **{name: (lambda run, name=name: run.settings.get(name, _DEFAULT), short) for name in differing(runs)},
        "seed": (lambda run: run.summary.get("seed"), str),
        "status": (lambda run: run.summary["status"], str),
        "solved": (lambda run: run.summary["solved"], lambda value: "yes" if value else "no"),
        **FIGURES,
    }


def differing(runs: Sequence[Run]) -> list[str]:
    """Return the settings, except backend and seed, that differ between ``runs``."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [name for name in names if len({run.settings.get(name) for run in runs}) > 1]


def numeric_setting(runs: Sequence[Run]) -> str | None:
    """Return the setting with the most different numbers, to draw the runs over it; None if none has three or more."""
    counts = {
        name: len({_in_order(run.settings[name])[0] for run in runs})
        for name in differing(runs)
        if all(math.isfinite(_in_order(run.settings.get(name, ""))[0]) for run in runs)
    }
    name = max(counts, key=lambda name: counts[name], default=None)
    return name if name is not None and counts[name] >= 3 else None


def curves(runs: Sequence[Run], over: str) -> dict[str, dict[float, list[Run]]]:
    """Return the runs by all settings but `over` and the seed, and then by the value of `over`, in order.

    A curve's name lists what differs: the backend, if there are several, and settings; it is empty for a single curve.
    """
    found: dict[str, dict[float, list[Run]]] = {}
    for label, alike in _alike(runs, [name for name in differing(runs) if name != over]).items():
        points = found.setdefault(label, {})
        for run in sorted(alike, key=lambda run: float(run.settings[over])):
            points.setdefault(float(run.settings[over]), []).append(run)
    return found


def common(runs: Sequence[Run], fact: str) -> Any:
    """Return the value of ``fact`` in the summaries of ``runs``; None if they differ."""
    values = {run.summary.get(fact) for run in runs}
    return values.pop() if len(values) == 1 else None


def groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs grouped by all settings but the seed; a group's name lists what differs, or is the backend."""
    alike = _alike(runs, differing(runs))
    return {label or found[0].backend: found for label, found in alike.items()}


def _alike(runs: Sequence[Run], names: Sequence[str]) -> dict[str, list[Run]]:
    """Return the runs by backend and the settings `names`; a label has the backend only if there are several."""
    several = len({run.backend for run in runs}) > 1
    found: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        found.setdefault((run.backend, *(run.settings.get(name, _DEFAULT) for name in names)), []).append(run)
    labels: dict[str, list[Run]] = {}
    for (backend, *values), alike in found.items():
        for write in (short, str):  # in full if two values are the same in short
            label = " ".join([backend] * several + [f"{n}={write(v)}" for n, v in zip(names, values, strict=True)])
            if label not in labels:
                break
        labels[label] = alike
    return labels


def short(value: str) -> str:
    """Return a setting's value, a long number with three significant digits."""
    number, _ = _in_order(value)
    return f"{number:.3g}" if len(value) > 8 and math.isfinite(number) else value


def read_runs(folder: Path) -> tuple[list[Run], list[str]]:
    """Return the runs in a sweep's folder that have ended, ordered by backend, settings and seed.

    With them, a line for each of the other runs that names what is missing or damaged.

    Raises:
        FolderError: no run has ended there, or none is readable.
    """
    runs, left_out = [], []
    for each in sorted({path.parent for name in (".hydra", METRICS, SUMMARY) for path in folder.glob(f"*/**/{name}")}):
        try:
            if not (each / SUMMARY).is_file():
                raise FolderError(f"{each} has no {SUMMARY}: it has not begun, or not ended, or was killed")
            runs.append(Run(each, read_summary(each), list(read_rows(each))))
        except FolderError as error:
            left_out.append(str(error))
    if not runs:
        raise FolderError("\n".join([f"no run has ended in {folder}: there is no {SUMMARY} to read", *left_out]))
    names = differing(runs)

    def place(run: Run) -> tuple[Any, ...]:
        return run.backend, [_in_order(run.settings.get(name, "")) for name in names], run.summary.get("seed") or 0

    return sorted(runs, key=place), left_out


def _in_order(value: str) -> tuple[float, str]:
    """Return a sort key: numbers by value, other strings alphabetically after them."""
    try:
        return float(value), value
    except ValueError:
        return float("inf"), value
