"""The report of a sweep: its runs in one table, their curves side by side, a CSV file, and one page with all of it."""

from __future__ import annotations

import base64
import csv
import html
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from learning.reporting.console import microseconds
from learning.reporting.files import writing
from learning.reporting.sweep_runs import FIGURES, Column, Run, columns, common, groups, numeric_setting, read_runs

TABLE, PAGE = "sweep.csv", "sweep.html"

# Columns to drop, in this order, in a narrow terminal.
_SPARE = (  # columns that a narrow terminal does without, in this order
    "GiB/s",
    "sync p99",
    "mean staleness",
    "sync p95",
    "frames to solved",
    "frames/s",
    "s to solved",
    "status",
)


def _cells(run: Run, shown: Mapping[str, Column]) -> list[str]:
    return [write(figure(run)) for figure, write in shown.values()]


def _medians(runs: Sequence[Run], shown: Mapping[str, Column]) -> list[str]:
    """Return one row for runs that differ only in the seed: the number solved, and medians of the complete runs."""
    cells = dict(zip(shown, _cells(runs[0], shown), strict=True))
    solved = sum(run.summary["solved"] for run in runs)
    cells |= {"seed": "median", "status": "", "solved": f"{solved} of {len(runs)}"}
    for name, (figure, write) in FIGURES.items():
        known = [value for run in runs if run.complete and (value := figure(run)) is not None]
        cells[name] = write(statistics.median(known) if known else None)
    return list(cells.values())


def table_rows(runs: Sequence[Run]) -> Iterable[tuple[list[str], bool]]:
    """Yield the rows of the table, and whether each is a row of medians; these follow runs that differ in the seed."""
    shown = columns(runs)
    for group in groups(runs).values():
        yield from ((_cells(run, shown), False) for run in group)
        if len(group) > 1:
            yield _medians(group, shown), True


def report(folder: Path, console: Console | None = None) -> None:
    """Write the report of the sweep in ``folder`` into it, and print its table.

    Runs without a summary are left out and named.

    Raises:
        FolderError: no run has ended there, or the report cannot be written.
    """
    runs, left_out = read_runs(folder)
    with writing(folder / TABLE), open(folder / TABLE, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        shown = columns(runs)
        # In the terminal and the page, each cell has its unit.
        names = [f"{name} (µs)" if write is microseconds else name for name, (_, write) in shown.items()]
        writer.writerow(["run", *names])
        for run in runs:
            writer.writerow([run.folder.relative_to(folder), *(figure(run) for figure, _ in shown.values())])
    pictures = _draw(folder, runs)
    with writing(folder / PAGE):
        (folder / PAGE).write_text(_page(runs, left_out, pictures), encoding="utf-8")
    console = console or Console(highlight=False)
    _show(runs, folder, console)
    for line in left_out:
        console.print(f"left out: {line}", soft_wrap=True, markup=False)


def _draw(folder: Path, runs: Sequence[Run]) -> list[Path]:
    """Draw the pictures into `folder`; return their paths."""
    from learning.reporting import sweep_plots  # matplotlib takes most of a second to import

    figures = {"sweep_returns.png": sweep_plots.returns, "sweep_latency.png": sweep_plots.latencies}
    if numeric_setting(runs) is not None:
        figures = {"sweep_setting.png": sweep_plots.over_setting, **figures}
    for name, draw in figures.items():
        with writing(folder / name):
            draw(groups(runs)).savefig(folder / name)
    return [folder / name for name in figures]


def _show(runs: Sequence[Run], folder: Path, console: Console) -> None:
    names = list(columns(runs))
    table = _table(runs, names)
    if not console.is_terminal:
        console.width = _wanted(table, console)
    for spare in _SPARE:  # the page has all columns
        if _wanted(table, console) <= console.width:
            break
        names.remove(spare)
        table = _table(runs, names)
    console.print(table)
    console.print(f"report: {folder / PAGE}", soft_wrap=True, markup=False)


def _counted(runs: Sequence[Run]) -> str:
    return "1 run" if len(runs) == 1 else f"{len(runs)} runs"


def _wanted(table: Table, console: Console) -> int:
    """Return the width that the table needs."""
    return console.measure(table, options=console.options.update(max_width=1000)).maximum


def _table(runs: Sequence[Run], names: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, title=_counted(runs), title_justify="left")
    chosen = [list(columns(runs)).index(name) for name in names]
    for name in names:
        table.add_column(name, justify="left" if name in ("backend", "status") else "right", no_wrap=True)
    for cells, is_median in table_rows(runs):
        table.add_row(*(cells[i] for i in chosen), style="bold" if is_median else None, end_section=is_median)
    return table


def _page(runs: Sequence[Run], left_out: Sequence[str], pictures: Sequence[Path]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns(runs))
    body = "".join(
        f'<tr class="{"median" if is_median else ""}">'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        + "</tr>\n"
        for cells, is_median in table_rows(runs)
    )
    images = "".join(
        f'<img alt="{one.name}" src="data:image/png;base64,{base64.b64encode(one.read_bytes()).decode()}">\n'
        for one in pictures
    )
    title, workers = f"{common(runs, 'env') or 'Sweep'}: {_counted(runs)}", common(runs, "num_workers")
    title += "" if workers is None else f", {workers} workers each"
    missing = "".join(f"<p>Left out: {html.escape(line)}</p>\n" for line in left_out)
    return _PAGE.format(title=html.escape(title), head=head, body=body, missing=missing, images=images)


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
<p>Latency is from the call of <code>send</code> until later forwards use the weights. With
<code>weight_sync.acknowledge=published</code>, as <code>train.py</code> uses <code>shared_mem</code>, no worker has to
wake for that; otherwise every worker has installed them. Seconds are counted from the
first environment step. Medians, and the picture of latencies, are of the runs that were solved or finished. The same
figures are in <code>sweep.csv</code> and in each run's <code>summary.json</code>.</p>
{missing}{images}</body></html>
"""
