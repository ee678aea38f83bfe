"""Results as a person reads them: a line per case as they come, a table at the end, a file with everything."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.cases import Case

Row = dict[str, Any]
_WIDE = 130  # columns of a terminal that takes the whole table


class Reporter:
    """Shows how far the benchmark is, and each result when it is there.

    Args:
        console: where.
        total: how many cases.
    """

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("starting", total=total)

    def __enter__(self) -> Self:
        """Show the bar, where there is a terminal."""
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Take it away."""
        self._progress.stop()

    def begin(self, case: Case) -> None:
        """A case is begun."""
        self._progress.update(self._task, description=case.title)

    def done(self, case: Case, row: Row) -> None:
        """A case is done."""
        self._progress.advance(self._task)
        self._console.print(line(case.title, row), soft_wrap=True, highlight=False)


def line(title: str, row: Row) -> str:
    """One result."""
    if row["status"] == "failed":
        return f"{title}: [red]failed[/]: {row['error']}"
    text = f"{title}: p50 {us(row['p50_us'])}, p95 {us(row['p95_us'])}, {row['over_copy']:g} × a copy{_beside(row)}"
    return f"{text}  [bold red]WRONG[/] {row['wrong']}×: {row['wrong_example']}" if row["wrong"] else text


def _beside(row: Row) -> str:
    peer = row.get("peer")
    if peer is None:
        return ""
    if "ratio_p50" not in peer:
        return f"; {peer['name']}: {peer['error']}"
    wrong = f" (WRONG {peer['wrong']}×: {peer['wrong_example']})" if peer["wrong"] else ""
    return f"; {peer['name']} p50 {us(peer['p50_us'])}, p95 {us(peer['p95_us'])}: {peer['ratio_p50']:g} ×{wrong}"


def show(console: Console, rows: Sequence[Row]) -> None:
    """Print the tables."""
    for kind, title in (
        ("send", "An acknowledged send, standalone"),
        ("update", "A collector's update_policy_weights_(), between batches"),
    ):
        chosen = [row for row in rows if row["kind"] == kind]
        if chosen:
            console.print(_table(title, chosen, console.width >= _WIDE))
    console.print(
        "Times in µs, or in ms where it says so. copy: ratio of p50 to a plain copy of the same bytes, in turn in the "
        "same process. CPU: of the trainer and of all workers, until the call returned. mem: growth of the peak, of "
        "the trainer and of the largest worker, MiB. acting: of calls while the workers do nothing but forward. pause: "
        "how much later than usual one of these forwards ended, with new weights.",
        style="dim",
        highlight=False,
    )


def _table(title: str, rows: Sequence[Row], wide: bool) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    columns: dict[str, Callable[[Row], str]] = {
        "backend": lambda row: row["label"],
        "MiB": lambda row: f"{row['mib']:g}",
        "to": lambda row: str(row["workers"]),
        "p50": lambda row: _cell(row, "p50_us"),
        "p95": lambda row: _cell(row, "p95_us"),
    }
    if wide:
        columns |= {
            "p99": lambda row: _cell(row, "p99_us"),
            "min": lambda row: _cell(row, "min_us"),
            "GiB/s": lambda row: _cell(row, "gib_s", 2),
        }
    columns["copy"] = lambda row: _cell(row, "over_copy", 1)
    if wide:
        columns["CPU"] = lambda row: f"{_cell(row, 'trainer_cpu_us')} + {_cell(row, 'workers_cpu_us')}"
        columns["mem"] = _memory
    if any("acting" in row for row in rows):
        columns["acting p50"] = lambda row: _cell(row.get("acting", {}), "p50_us")
        columns["p95  "] = lambda row: _cell(row.get("acting", {}), "p95_us")
        columns["pause"] = lambda row: _cell(row.get("acting", {}), "pause_p50_us")
    if any("peer" in row for row in rows):
        columns["peer p50"] = lambda row: _cell(row.get("peer", {}), "p50_us")
        columns["p95 "] = lambda row: _cell(row.get("peer", {}), "p95_us")
        columns["ratio"] = lambda row: _cell(row.get("peer", {}), "ratio_p50", 1)
    columns[""] = lambda row: "" if row["status"] == "ok" else f"[red]{row['status']}[/]"
    for heading in columns:
        table.add_column(heading.strip(), justify="left" if heading in ("backend", "") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table


def _memory(row: Row) -> str:
    growth = {one["who"]: one["growth"] for one in row["memory_mib"]}
    workers = [value for who, value in growth.items() if who != "trainer"]
    return f"{growth['trainer']:.0f} + {max(workers):.0f}" if workers else "–"


def _cell(row: Row, key: str, digits: int = 0) -> str:
    value = row.get(key)
    if value is None:
        return "–"
    return f"{value:,.{digits}f}" if value < 1e4 else f"{value / 1e3:,.1f} ms"


def us(value: float) -> str:
    """Microseconds, as short as it goes."""
    return f"{value:,.0f} µs" if value < 1e4 else f"{value / 1e3:,.1f} ms"


def write(path: Path, machine: dict[str, Any], settings: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write everything as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine, "settings": settings, "cases": list(rows)}
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
