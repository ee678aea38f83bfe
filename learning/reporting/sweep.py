"""The report of a sweep: its runs in one table, their curves side by side, a CSV file, and one page with all of it."""

from __future__ import annotations

import base64
import csv
import html
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from learning.reporting.console import microseconds, number
from learning.reporting.files import METRICS, SUMMARY, FolderError, read_rows, read_summary, writing
from learning.summary import return_text

TABLE, PAGE = "sweep.csv", "sweep.html"
_DEFAULT = "default"  # of a setting that only other runs' command lines name


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
        means = [
            (row["episode_return_mean_100"], b - a) for row, (a, b) in zip(self.rows, pairwise(frames), strict=True)
        ]
        known = [(mean, weight) for mean, weight in means if mean is not None]
        return statistics.fmean(*map(list, zip(*known, strict=True))) if known else None


Column = tuple[Callable[[Run], Any], Callable[[Any], str]]
"""A figure, in the units of ``summary.json`` (µs, s), and how it is formatted."""

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
_SPARE = ("frames to solved", "sync p95", "sync p99", "GiB/s", "mean staleness")
"""Columns that a terminal does without."""


def report(folder: Path, console: Console | None = None) -> None:
    """Write the report of the sweep in ``folder`` into it, and print its table.

    Runs without a summary are left out and named.

    Raises:
        FolderError: no run has ended there, or the report cannot be written.
    """
    runs, left_out = read_runs(folder)
    shown = columns(runs)
    with writing(folder / TABLE), open(folder / TABLE, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)  # in the terminal and the page, each cell has its unit
        writer.writerow(["run", *(f"{name} (µs)" if one[1] is microseconds else name for name, one in shown.items())])
        for run in runs:
            writer.writerow([run.folder.relative_to(folder), *(figure(run) for figure, _ in shown.values())])
    pictures = list(_draw(folder, runs))
    with writing(folder / PAGE):
        (folder / PAGE).write_text(_page(runs, left_out, pictures), encoding="utf-8")
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000
    console.print(_table(runs, console))
    for line in (f"report: {folder / PAGE}", *(f"left out: {line}" for line in left_out)):
        console.print(line, soft_wrap=True, markup=False)


def _table(runs: Sequence[Run], console: Console) -> Table:
    """Return the table of the runs; in a terminal, with the figures that matter most."""
    shown = [not (console.is_terminal and name in _SPARE) for name in columns(runs)]
    table = Table(box=SIMPLE_HEAD, title=_counted(runs), title_justify="left")
    for name in compress(columns(runs), shown):
        table.add_column(name, justify="left" if name in ("backend", "status") else "right", no_wrap=True)
    for cells, is_median in table_rows(runs):
        table.add_row(*compress(cells, shown), style="bold" if is_median else None, end_section=is_median)
    return table


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
    return sorted(runs, key=lambda run: (run.sync["scheme"], [_number(one) for one in run.settings.values()])), left_out


def _number(value: str) -> float:
    """Return the value of a setting that is a number; infinity for any other."""
    try:
        return float(value)
    except ValueError:
        return math.inf


def differing(runs: Sequence[Run]) -> list[str]:
    """Return the settings, except backend and seed, that differ between ``runs``."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [name for name in names if len({run.settings.get(name) for run in runs}) > 1]


def numeric_setting(runs: Sequence[Run]) -> str | None:
    """Return the setting with the most different numbers, to draw the runs over it; None if none has three or more."""
    values = {name: {_number(run.settings.get(name, "")) for run in runs} for name in differing(runs)}
    counts = {name: len(found) for name, found in values.items() if all(map(math.isfinite, found)) and len(found) > 2}
    return max(counts, key=lambda name: counts[name], default=None)


def common(runs: Sequence[Run], fact: str) -> Any:
    """Return the value of ``fact`` in the summaries of ``runs``; None if they differ."""
    values = {run.summary.get(fact) for run in runs}
    return values.pop() if len(values) == 1 else None


def groups(runs: Sequence[Run], without: str | None = None) -> dict[str, list[Run]]:
    """Return the runs that differ only in the seed, and in the setting `without`, by what differs between the groups.

    That is the backend, if there are several or nothing else differs, and settings.
    """
    names = [name for name in differing(runs) if name != without]
    several = common([Run(run.folder, run.sync, ()) for run in runs], "scheme") is None or not names
    found: dict[str, list[Run]] = {}
    for run in runs:
        settings = [f"{name}={run.settings.get(name, _DEFAULT)}" for name in names]
        found.setdefault(" ".join([run.sync["scheme"]] * several + settings), []).append(run)
    return found


def columns(runs: Sequence[Run]) -> dict[str, Column]:
    """Return the columns of a table of ``runs``, including the settings that differ between them."""
    return {
        "backend": (lambda run: run.sync["scheme"], str),
        **{name: (lambda run, name=name: run.settings.get(name, _DEFAULT), str) for name in differing(runs)},
        "seed": (lambda run: run.summary.get("seed"), str),
        "status": (lambda run: run.summary["status"], str),
        "solved": (lambda run: run.summary["solved"], lambda value: "yes" if value else "no"),
        **FIGURES,
    }


def table_rows(runs: Sequence[Run]) -> Iterator[tuple[list[str], bool]]:
    """Yield the rows of the table, and whether each is a row of medians; these follow runs that differ in the seed."""
    shown = columns(runs)
    for group in groups(runs).values():
        rows = [[write(figure(run)) for figure, write in shown.values()] for run in group]
        yield from ((row, False) for row in rows)
        if len(group) > 1:
            solved = f"{sum(run.summary['solved'] for run in group)} of {len(group)}"
            cells = dict(zip(shown, rows[0], strict=True)) | {"seed": "median", "status": "", "solved": solved}
            for name, (figure, write) in FIGURES.items():  # of the complete runs
                known = [value for run in group if run.complete and (value := figure(run)) is not None]
                cells[name] = write(statistics.median(known) if known else None)
            yield list(cells.values()), True


def _draw(folder: Path, runs: Sequence[Run]) -> Iterator[Path]:
    """Draw the pictures into `folder`; yield their paths."""
    from learning.reporting import plots  # matplotlib takes most of a second to import

    env = "" if common(runs, "env") is None else f", {common(runs, 'env')}"
    figures = {
        "sweep_returns.png": plots.sweep_returns(groups(runs), env, common(runs, "solved_at")),
        "sweep_latency.png": plots.sweep_latency(groups(runs)),
    }
    if (setting := numeric_setting(runs)) is not None:
        ended = [run for run in runs if run.complete and run.final_return is not None]
        figures = {"sweep_setting.png": plots.sweep_setting(groups(ended, setting), setting, env), **figures}
    for name, figure in figures.items():
        with writing(folder / name):
            figure.savefig(folder / name)
        yield folder / name


def _counted(runs: Sequence[Run]) -> str:
    return "1 run" if len(runs) == 1 else f"{len(runs)} runs"


def _page(runs: Sequence[Run], left_out: Sequence[str], pictures: Sequence[Path]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns(runs))
    rows = [
        ("median" if is_median else "", "".join(f"<td>{html.escape(cell)}</td>" for cell in cells))
        for cells, is_median in table_rows(runs)
    ]
    body = "".join(f'<tr class="{kind}">{cells}</tr>\n' for kind, cells in rows)
    encoded = {one.name: base64.b64encode(one.read_bytes()).decode() for one in pictures}
    images = "".join(f'<img alt="{name}" src="data:image/png;base64,{one}">\n' for name, one in encoded.items())
    title, workers = f"{common(runs, 'env') or 'Sweep'}: {_counted(runs)}", common(runs, "num_workers")
    title += "" if workers is None else f", {workers} workers each"
    missing = "".join(f"<p>Left out: {html.escape(line)}</p>\n" for line in left_out)
    return _PAGE.format(title=html.escape(title), head=head, body=body, missing=missing, images=images)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; color: #1f2933; max-width: 76rem; margin: 2rem auto; padding: 0 1rem }}
.wide {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: .25rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e4e7eb }}
.median td {{ font-weight: 600; background: #f5f7fa }}
img {{ width: 100%; margin: 1.2rem 0 }}
</style></head><body>
<h1>{title}</h1>
<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>
{body}</tbody></table></div>
<p>Latency is from the call of <code>send</code> until later forwards use the weights. With
<code>weight_sync.acknowledge=published</code>, as <code>train.py</code> uses <code>shared_mem</code>, no worker has to
wake for that; otherwise every worker has installed them. Seconds are counted from the
first environment step. Medians, and the picture of latencies, are of the runs that were solved or finished. The same
figures are in <code>sweep.csv</code> and in each run's <code>summary.json</code>.</p>
{missing}{images}</body></html>
"""
