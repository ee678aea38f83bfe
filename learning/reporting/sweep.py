"""The report of a sweep: its runs in one table, their curves side by side, a CSV file, and one page with all of it."""

from __future__ import annotations

import base64
import csv
import html
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from learning.reporting.console import microseconds, number
from learning.reporting.files import METRICS, SUMMARY, read_rows

TABLE, PAGE, PICTURES = "sweep.csv", "sweep.html", ("sweep_returns.png", "sweep_latency.png")


@dataclass(frozen=True)
class Run:
    """One run of a sweep: its folder, what ``summary.json`` says of it, and its rows."""

    folder: Path
    summary: dict[str, Any]
    rows: Sequence[dict[str, Any]]

    @property
    def sync(self) -> dict[str, Any]:
        """What its weight sync cost."""
        return self.summary["weight_sync"]

    @property
    def backend(self) -> str:
        """The scheme's name."""
        return self.sync["scheme"]

    @property
    def seconds_to_solved(self) -> float | None:
        """Seconds from the first step until it was solved; None if it was not."""
        return next((row["seconds"] for row in self.rows if _solved(row, self.summary)), None)


def _solved(row: dict[str, Any], summary: dict[str, Any]) -> bool:
    mean, goal = row["episode_return_mean_100"], summary.get("solved_at")
    return goal is not None and mean is not None and mean >= goal and summary["solved"]


_SPARE = ("status", "return", "GiB/s", "staleness", "sync p99", "frames/s", "sync p95")  # where a terminal is narrow
Figure = Callable[[Run], Any]
COLUMNS: dict[str, tuple[Figure, Callable[[Any], str]]] = {
    "backend": (lambda run: run.backend, str),
    "seed": (lambda run: run.summary.get("seed"), str),
    "status": (lambda run: run.summary["status"], str),
    "solved": (lambda run: run.summary["solved"], lambda value: "yes" if value else "no"),
    "s to solved": (lambda run: run.seconds_to_solved, number),
    "return": (lambda run: run.summary["episode_return_mean_100"], number),
    "frames/s": (lambda run: run.summary["frames_per_second"], lambda value: number(value, 0)),
    "sync p50": (lambda run: run.sync["latency_us"].get("p50"), microseconds),
    "sync p95": (lambda run: run.sync["latency_us"].get("p95"), microseconds),
    "sync p99": (lambda run: run.sync["latency_us"].get("p99"), microseconds),
    "GiB/s": (lambda run: run.sync.get("gib_per_second"), lambda value: number(value, 3)),
    "staleness": (lambda run: run.sync.get("staleness_mean"), lambda value: number(value, 2)),
}
"""What the table tells of a run: the figure, as ``summary.json`` has it (µs, s), and how it is written for people."""


def read_runs(folder: Path) -> list[Run]:
    """The runs in a sweep's folder that came to an end, whatever that was; ordered by backend and seed.

    Raises:
        FileNotFoundError: there is none.
    """
    runs = [
        Run(path.parent, json.loads(path.read_text(encoding="utf-8")), list(read_rows(path.parent)))
        for path in sorted(folder.glob(f"*/{SUMMARY}"))
        if (path.parent / METRICS).is_file()
    ]
    if not runs:
        raise FileNotFoundError(f"no run has ended in {folder}: there is no */{SUMMARY}")
    return sorted(runs, key=lambda run: (run.backend, run.summary.get("seed") or 0))


def _cells(run: Run) -> list[str]:
    return [write(figure(run)) for figure, write in COLUMNS.values()]


def _medians(runs: Sequence[Run]) -> list[str]:
    """One row for a backend: how many of its runs were solved, and the medians of the figures."""
    cells = {name: "" for name in COLUMNS}
    solved = sum(run.summary["solved"] for run in runs)
    cells |= {"backend": runs[0].backend, "seed": "median", "solved": f"{solved} of {len(runs)}"}
    for name in list(COLUMNS)[4:]:
        figure, write = COLUMNS[name]
        known = [value for run in runs if (value := figure(run)) is not None]
        cells[name] = write(statistics.median(known) if known else None)
    return list(cells.values())


def _by_backend(runs: Sequence[Run]) -> list[list[Run]]:
    names = dict.fromkeys(run.backend for run in runs)
    return [[run for run in runs if run.backend == name] for name in names]


def table_rows(runs: Sequence[Run]) -> Iterable[tuple[list[str], bool]]:
    """The table, row by row; whether it is one of medians, which follow the runs of a backend that has several."""
    for group in _by_backend(runs):
        yield from ((_cells(run), False) for run in group)
        if len(group) > 1:
            yield _medians(group), True


def report(folder: Path, console: Console | None = None) -> None:
    """Write the report of the sweep in ``folder`` into it, and print its table.

    Raises:
        FileNotFoundError: no run has ended there.
    """
    runs = read_runs(folder)
    with open(folder / TABLE, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", *COLUMNS])
        writer.writerows([run.folder.name, *(figure(run) for figure, _ in COLUMNS.values())] for run in runs)
    from learning.reporting import sweep_plots  # matplotlib takes most of a second to import

    sweep_plots.returns(_by_backend(runs), folder / PICTURES[0])
    sweep_plots.latencies(_by_backend(runs), folder / PICTURES[1])
    (folder / PAGE).write_text(_page(folder, runs), encoding="utf-8")
    _show(runs, folder, console or Console(highlight=False))


def _show(runs: Sequence[Run], folder: Path, console: Console) -> None:
    names = list(COLUMNS)
    table = _table(runs, names)
    if not console.is_terminal:
        console.width = _wanted(table, console)
    for spare in _SPARE:  # the page has them all
        if _wanted(table, console) <= console.width:
            break
        names.remove(spare)
        table = _table(runs, names)
    console.print(table)
    console.print(f"report: {folder / PAGE}", soft_wrap=True)


def _wanted(table: Table, console: Console) -> int:
    """The width that the table would take."""
    return console.measure(table, options=console.options.update(max_width=1000)).maximum


def _table(runs: Sequence[Run], names: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, title=f"{len(runs)} runs", title_justify="left")
    chosen = [list(COLUMNS).index(name) for name in names]
    for name in names:
        table.add_column(name, justify="left" if name in ("backend", "status") else "right", no_wrap=True)
    for cells, is_median in table_rows(runs):
        table.add_row(*(cells[i] for i in chosen), style="bold" if is_median else None, end_section=is_median)
    return table


def _page(folder: Path, runs: Sequence[Run]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in COLUMNS)
    body = "".join(
        f'<tr class="{"median" if is_median else ""}">'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        + "</tr>\n"
        for cells, is_median in table_rows(runs)
    )
    pictures = "".join(
        f'<img alt="{name}" src="data:image/png;base64,{base64.b64encode((folder / name).read_bytes()).decode()}">\n'
        for name in PICTURES
    )
    first = runs[0].summary
    title = f"{first.get('env', 'Sweep')}: {len(runs)} runs, {first.get('num_workers', '?')} workers each"
    return _PAGE.format(title=html.escape(title), head=head, body=body, pictures=pictures)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; color: #1f2933; max-width: 76rem; margin: 2rem auto; padding: 0 1rem }}
h1 {{ font-size: 1.4rem }}
.wide {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: .25rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e4e7eb }}
th:first-child, td:first-child {{ text-align: left }}
th {{ color: #52606d; font-weight: 600 }}
.median td {{ font-weight: 600; background: #f5f7fa }}
img {{ width: 100%; margin: 1.2rem 0 }}
p {{ color: #52606d }}
</style></head><body>
<h1>{title}</h1>
<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>
{body}</tbody></table></div>
<p>Latency is from the call of <code>send</code> to the moment when its promise holds; seconds are counted from the
first environment step. The same figures are in <code>sweep.csv</code> and in each run's <code>summary.json</code>.</p>
{pictures}</body></html>
"""
