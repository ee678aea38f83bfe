"""From measurements to figures; figures as lines, as a table and as a file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.conductor import Measured
from bench.config import Case
from bench.measurements import Acting
from wsync.metrics import percentile
from wsync.types import PHASES

Row = dict[str, Any]
_WIDE = 130  # columns of a terminal that the whole table needs


def figures(case: Case, measured: Measured) -> dict[str, Any]:
    """Return the figures of one side of a case: plain values, times in µs, memory in MiB."""
    bad = measured.wrong
    found: dict[str, Any] = {
        "status": "failed" if measured.error else "WRONG" if bad else "ok",
        "rounds": len(measured.rounds),
        "wrong": len(bad),
        "wrong_example": bad[0] if bad else "",
        "error": measured.error,
        "trace": measured.trace,
    }
    if measured.rounds:
        found |= _times(case, measured)
    if measured.acting is not None:
        found["acting"] = _acting(measured.acting)
    found["memory_mib"] = [
        {name: value if name == "process" else round(value / 2**20, 2) for name, value in asdict(one).items()}
        for one in measured.memory
    ]
    return found


def _times(case: Case, measured: Measured) -> dict[str, Any]:
    rounds = measured.rounds
    latency, copy = [one.seconds for one in rounds], statistics.median(one.copy for one in rounds)
    phases = {
        phase: _us(statistics.median(one.phases.get(phase, 0.0) for one in rounds))
        for phase in PHASES
        if any(one.phases for one in rounds)
    }
    return {
        "p50_us": _us(statistics.median(latency)),
        "p95_us": _us(percentile(latency, 0.95)),
        "p99_us": _us(percentile(latency, 0.99)),
        "min_us": _us(min(latency)),
        "gib_s": round(case.mib / 1024 / statistics.median(latency), 3),
        "copy_p50_us": _us(copy),
        "over_copy": round(statistics.median(latency) / copy, 2),
        "trainer_cpu_us": _us(statistics.median(one.trainer_cpu for one in rounds)),
        "workers_cpu_us": _us(statistics.median(one.workers_cpu for one in rounds)),
        "phases_us": phases,
    }


def _acting(acting: Acting) -> dict[str, Any]:
    """Return the figures of acting. ``pause``: the delay of the first forward with new weights over the usual time."""
    usual = statistics.median(pauses.usual for pauses in acting.pauses)
    switches = [gap - pauses.usual for pauses in acting.pauses for gap in pauses.switches]
    return {
        "sends": len(acting.seconds),
        "p50_us": _us(statistics.median(acting.seconds)),
        "p95_us": _us(percentile(acting.seconds, 0.95)),
        "usual_us": _us(usual),
        "usual_longest_us": _us(max(pauses.usual_longest for pauses in acting.pauses)),
        "pause_p50_us": _us(max(0.0, statistics.median(switches))) if switches else None,
        "pause_p95_us": _us(max(0.0, percentile(switches, 0.95))) if switches else None,
        "longest_us": _us(max(pauses.longest for pauses in acting.pauses)),
        "forwards": sum(pauses.forwards for pauses in acting.pauses),
        "mixed": sum(pauses.mixed for pauses in acting.pauses),
        "backwards": sum(pauses.backwards for pauses in acting.pauses),
    }


def row(case: Case, measured: Mapping[str, Measured], ours: str) -> Row:
    """Return one row of the results: the case, our figures, and the peer's with ratios."""
    sides = {name: figures(case, one) for name, one in measured.items()}
    mine = sides.pop(ours)
    found: Row = {**asdict(case), "label": case.label, **mine}
    for name, side in sides.items():
        found["peer"] = {"name": name, **side}
        if "p50_us" in side and "p50_us" in mine:
            found["peer"]["ratio_p50"] = round(side["p50_us"] / mine["p50_us"], 2)
            found["peer"]["ratio_p95"] = round(side["p95_us"] / mine["p95_us"], 2)
            found["peer"]["our_p95_over_its_p50"] = round(mine["p95_us"] / side["p50_us"], 3)
    return found


def exit_status(rows: Sequence[Row]) -> int:
    """Return 0 if all our cases were measured and correct; errors of the peer do not count."""
    return int(any(one["status"] != "ok" for one in rows))


def line(title: str, row: Row) -> str:
    """Return one row in words."""
    if row["status"] == "failed":
        return f"{title}: [red]failed[/]: {row['error']}"
    text = (
        f"{title}: p50 {short(row['p50_us'])}, p95 {short(row['p95_us'])}, {row['over_copy']:g} × a copy{_beside(row)}"
    )
    return f"{text}  [bold red]WRONG[/] {row['wrong']}×: {row['wrong_example']}" if row["wrong"] else text


def _beside(row: Row) -> str:
    peer = row.get("peer")
    if peer is None:
        return ""
    if "ratio_p50" not in peer:
        return f"; {peer['name']}: {peer['error']}"
    wrong = f" (WRONG {peer['wrong']}×: {peer['wrong_example']})" if peer["wrong"] else ""
    return f"; {peer['name']} p50 {short(peer['p50_us'])}, p95 {short(peer['p95_us'])}: {peer['ratio_p50']:g} ×{wrong}"


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
        "Times in µs, unless marked ms. copy: ratio of p50 to a plain copy of the same bytes, in turn in the same "
        "process. CPU: of the trainer and of all workers, until the call returned. mem: growth of the peak, of the "
        "trainer and of the largest worker, MiB. acting: of calls while the workers do nothing but forward. pause: "
        "delay of the first of these forwards with new weights.",
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
    growth = {one["process"]: one["growth"] for one in row["memory_mib"]}
    workers = [value for name, value in growth.items() if name != "trainer"]
    return f"{growth['trainer']:.0f} + {max(workers):.0f}" if workers else "–"


def _cell(row: Row, key: str, digits: int = 0) -> str:
    value = row.get(key)
    if value is None:
        return "–"
    return f"{value:,.{digits}f}" if value < 1e4 else f"{value / 1e3:,.1f} ms"


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def short(value: float) -> str:
    """Format microseconds."""
    return f"{value:,.0f} µs" if value < 1e4 else f"{value / 1e3:,.1f} ms"


def write(path: Path, machine: dict[str, Any], settings: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write everything as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine, "settings": settings, "cases": list(rows)}
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
