"""The report of a sweep: its runs in one table, their curves side by side, a CSV file, and one page with all of it."""

from __future__ import annotations

import base64
import html
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from learning.reporting.console import microseconds, number
from learning.reporting.files import METRICS, SUMMARY, FolderError, file_errors, read_rows, read_summary, write_csv
from learning.summary import return_text

PAGE, DATA, OVER_RUN = "sweep.html", "sweep.csv", "return over the run"
FIGURES = {
    "return": return_text,
    "s to solved": number,
    "frames to solved": partial(number, digits=0),
    "frames/s": partial(number, digits=0),
    "sync p50": microseconds,
    "sync p95": microseconds,
    "sync p99": microseconds,
    "mean staleness": partial(number, digits=2),
}
"""The figures of a run in the table, in the units of ``summary.json`` (µs, s), and how each is formatted."""
_SPARE = (  # what a terminal does without, until the rest fits
    "sync p99", "sync p95", "mean staleness", "frames to solved", "sync p50", "status", "solved", "frames/s",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One run of a sweep."""

    folder: Path
    summary: dict[str, Any]
    rows: Sequence[dict[str, Any]]

    @property
    def backend(self) -> str:
        return self.summary["weight_sync"]["scheme"]

    @property
    def complete(self) -> bool:
        """Whether it was solved or finished, rather than interrupted or failed."""
        return self.summary["status"] in ("solved", "finished")

    @property
    def settings(self) -> dict[str, str]:
        """The overrides of its command line, without backend and seed, which have columns of their own."""
        asked = (override.partition("=") for override in self.summary.get("overrides", ()))
        return {name: value for name, _, value in asked if name not in ("weight_sync", "seed")}

    @cached_property
    def figures(self) -> dict[str, Any]:
        """What `FIGURES` names, and the mean return of 100 episodes averaged over all frames; None: there is none."""
        sync, solved = self.summary["weight_sync"], self.summary.get("solved_after_frames")
        reached = (row["seconds"] for row in self.rows if solved is not None and row["frames"] >= solved)
        frames = pairwise([0, *(row["frames"] for row in self.rows)])
        means = [(row["episode_return_mean_100"], b - a) for row, (a, b) in zip(self.rows, frames, strict=True)]
        known = [(mean, weight) for mean, weight in means if mean is not None]
        return {
            "s to solved": next(reached, None),
            "frames to solved": solved,
            "return": self.summary["episode_return_mean_100"],
            "frames/s": self.summary["frames_per_second"],
            **{f"sync {p}": sync["latency_us"].get(p) for p in ("p50", "p95", "p99")},
            "mean staleness": self.summary["staleness"]["mean"],
            OVER_RUN: statistics.fmean(*zip(*known, strict=True)) if known else None,  # weighted by frames
        }


def report(folder: Path, console: Console | None = None) -> None:
    """Write the report of the sweep in ``folder`` into it, and print its table; runs without a summary are left out.

    Raises FolderError if no run has ended there, or the report cannot be written.
    """
    runs, left_out = read_runs(folder)
    pictures = list(_draw(folder, runs))
    with file_errors(folder / PAGE):
        (folder / PAGE).write_text(_page(runs, left_out, pictures), encoding="utf-8")
    units = {name: f"{name} (us)" for name, write in FIGURES.items() if write is microseconds}
    rows = (_cells(run, runs) | run.figures for run in runs)
    write_csv(folder / DATA, [{units.get(name, name): value for name, value in row.items()} for row in rows])
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000
    (shown, same), table, anywhere = columns(runs), Table(), console.options.update(max_width=1000)
    for name in (None, *_SPARE):
        shown = [one for one in shown if one != name]
        table = Table(box=SIMPLE_HEAD, title=f"{len(runs)} run{'s' * (len(runs) > 1)}", title_justify="left")
        for one in shown:
            justify = "left" if one in ("backend", "status") else "right"
            table.add_column(one.replace(" ", "\n"), justify=justify, vertical="bottom", no_wrap=True)
        for cells, is_median in table_rows(runs):
            table.add_row(*(cells[name] for name in shown), style="bold" if is_median else None, end_section=is_median)
        if console.measure(table, options=anywhere).maximum <= console.width:
            break
    console.print(table)
    for line in (*same, f"report: {folder / PAGE}", *(f"left out: {line}" for line in left_out)):
        console.print(line, soft_wrap=True, markup=False)


def read_runs(folder: Path) -> tuple[list[Run], list[str]]:
    """Return the runs in a sweep's folder that have ended, by backend and settings; and why others are left out."""
    runs, left_out = [], []
    for each in sorted({path.parent for name in (".hydra", METRICS, SUMMARY) for path in folder.glob(f"*/**/{name}")}):
        try:
            if not (each / SUMMARY).is_file():
                raise FolderError(f"{each} has no {SUMMARY}: it has not begun, or not ended, or was killed")
            run = Run(each, read_summary(each), list(read_rows(each)))
            _cells(run, [run])  # so that what they need is there
            runs.append(run)
        except (AttributeError, FolderError, KeyError, TypeError) as error:
            left_out.append(str(error) if isinstance(error, FolderError) else f"{each} is damaged: {error!r}")
    if not runs:
        raise FolderError("\n".join([f"no run has ended in {folder}: there is no {SUMMARY} to read", *left_out]))
    return sorted(runs, key=lambda run: (run.backend, [_number(one) for one in run.settings.values()])), left_out


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
    named = len({run.backend for run in runs}) > 1 or not names
    found: dict[str, list[Run]] = {}
    for run in runs:
        settings = [f"{name}={run.settings.get(name, 'default')}" for name in names]
        found.setdefault(" ".join([run.backend] * named + settings), []).append(run)
    return found


def _cells(run: Run, runs: Sequence[Run]) -> dict[str, str]:
    """Return the row of `run` in a table of `runs`, by column; the settings that differ between them are columns."""
    settings = {name: run.settings.get(name, "default") for name in differing(runs)}
    figures = {name: write(run.figures[name]) for name, write in FIGURES.items()}
    number = (re.findall(r"^\d+(?=-)", run.folder.name) or [run.folder.name])[0]
    first = {"run": number, "return": figures.pop("return"), "backend": run.backend, **settings}
    last = {"status": run.summary["status"], "solved": "yes" if run.summary["solved"] else "no"}
    return first | {"seed": str(run.summary.get("seed"))} | figures | last


def columns(runs: Sequence[Run]) -> tuple[list[str], list[str]]:
    """Return the columns of a table of `runs`; and, in a line if there is any, those that are the same in all."""
    first, *others = (_cells(run, runs) for run in runs)
    kept = ("run", "return") if others else first
    same = {name: cell for name, cell in first.items() if name not in kept and all(one[name] == cell for one in others)}
    told = [f"in all runs: {', '.join(f'{name} {cell}' for name, cell in same.items())}"] if same else []
    return [name for name in first if name not in same], told


def table_rows(runs: Sequence[Run]) -> Iterator[tuple[dict[str, str], bool]]:
    """Yield the rows of the table, and whether each is a row of medians; these follow runs that differ in the seed."""
    for group in groups(runs).values():
        yield from ((_cells(run, runs), False) for run in group)
        if len(group) > 1:
            solved = f"{sum(run.summary['solved'] for run in group)} of {len(group)}"
            medians = _cells(group[0], runs) | {"run": "median", "seed": "", "status": "", "solved": solved}
            for name, write in FIGURES.items():  # of the complete runs
                known = [value for run in group if run.complete and (value := run.figures[name]) is not None]
                medians[name] = write(statistics.median(known) if known else None)
            yield medians, True


def _draw(folder: Path, runs: Sequence[Run]) -> Iterator[Path]:
    """Draw the pictures into `folder`; yield their paths."""
    from learning.reporting import plots  # matplotlib takes most of a second to import

    env = "" if common(runs, "env") is None else f", {common(runs, 'env')}"
    figures = {
        "sweep_returns.png": plots.sweep_returns(groups(runs), env, common(runs, "solved_at")),
        "sweep_latency.png": plots.sweep_latency(groups(runs)),
    }
    if (setting := numeric_setting(runs)) is not None:
        ended = [run for run in runs if run.complete and None not in (run.figures["return"], run.figures[OVER_RUN])]
        figures = {"sweep_setting.png": plots.sweep_setting(groups(ended, setting), setting, env), **figures}
    for name, figure in figures.items():
        with file_errors(folder / name):
            figure.savefig(folder / name)
        yield folder / name


def _page(runs: Sequence[Run], left_out: Sequence[str], pictures: Sequence[Path]) -> str:
    shown, same = columns(runs)
    head = "".join(f"<th>{html.escape(name).replace('.', '.<wbr>').replace('_', '_<wbr>')}</th>" for name in shown)
    body = ""
    for cells, is_median in table_rows(runs):
        row = "".join(f"<td>{html.escape(cells[name])}</td>" for name in shown)
        body += f'<tr class="{"median" if is_median else ""}">{row}</tr>\n'
    encoded = {one.name: base64.b64encode(one.read_bytes()).decode() for one in pictures}
    images = "".join(f'<img alt="{name}" src="data:image/png;base64,{one}">\n' for name, one in encoded.items())
    title = html.escape(f"{common(runs, 'env') or 'Sweep'}: {len(runs)} run{'s' * (len(runs) > 1)}")
    notes = [one.capitalize() for one in same] + [f"Left out: {line}" for line in left_out]
    missing = "".join(f"<p>{html.escape(line)}</p>\n" for line in notes)
    page = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    return page.substitute(title=title, head=head, body=body, missing=missing, images=images)
