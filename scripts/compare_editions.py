"""Measure two checkouts of this repository against each other: one script for both, in alternation.

    python scripts/compare_editions.py OLD_CHECKOUT                         # against this one: 5 runs, 15 minutes
    python scripts/compare_editions.py OLD_CHECKOUT NEW_CHECKOUT --runs 3 --cells "shared_mem.*64 KiB"

A cell is ``send(model)`` of a standalone scheme by backend and payload, a collector's ``update_policy_weights_()`` of
18 KiB, or what the gate adds to a forward. The cells of one backend are measured in a fresh process in the checkout,
the checkouts in turn. A cell's figure is the median of its calls in a run, and then that of the runs. Workers check all
values that they see. The exit status is 1 if a cell cannot be measured, or new/old is above ``--limit`` in one.

The measuring code is ``harness/sides.py`` beside this script; it uses only public names, which both checkouts have.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve()
BUILD = "python -c 'import setuptools; setuptools.setup()' build_ext --inplace"
TIMEOUT = 180.0  # seconds for the cells of one process
PAYLOADS = {"64 KiB": (0.0625, 4, 200), "1 MiB": (1.0, 20, 100), "64 MiB": (64.0, 100, 15)}
"""By name: MiB, tensors, and the number of calls."""
SECONDS = 1.0  # for the calls of a cell
GLOO = {"shared_memory": False, "inline_bytes": 0}
SENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "shared_mem, published": ("shared_mem", {"acknowledge": "published"}),
    "shared_mem, installed": ("shared_mem", {"acknowledge": "installed"}),
    "distributed, gloo": ("distributed", GLOO),
    **{name: (name, {}) for name in ("multiprocess", "store", "http", "distributed", "rpc", "ray")},
}
"""By name: the backend, and the options of its scheme."""
PROCESSES = (
    ("send shared_mem, published", "send shared_mem, installed", "update shared_mem", "gate"),
    ("send multiprocess", "update multiprocess", "send store", "send http"),
    ("send distributed", "send distributed, gloo", "update distributed"),
    ("send rpc",),
    ("update rpc",),  # torch has one RPC group for each process
    ("send ray", "update ray"),
)
"""The subjects that are measured in one process: most of the time is that of starting it."""
Times = dict[str, list[float]]


def cells_of(subject: str) -> list[str]:
    """Return the names of a subject's cells."""
    if subject == "gate":
        return ["gate: what it adds to a forward"]
    sizes = list(PAYLOADS) if subject.startswith("send") else ["18 KiB"]
    return [f"{subject}, {size}" for size in sizes]


def measure(subject: str, cells: list[str]) -> dict[str, float]:
    """Return the µs of each of ``cells``, which are of one subject; RuntimeError: a worker saw other weights."""
    from harness.sides import Case, collecting, standalone, workers_of

    kind, _, name = subject.partition(" ")
    if kind == "update":
        with collecting(Case("update", name, 0.018, 6)) as side:
            return {cells[0]: p50(side, 100)}
    backend, options = SENDS.get(name, ("shared_mem", {}))
    found = dict[str, float]()
    with workers_of(backend, 2) as workers:
        for cell in cells:
            mib, tensors, calls = PAYLOADS.get(cell.rpartition(", ")[2], PAYLOADS["64 KiB"])
            with standalone(Case("send", backend, mib, tensors, 2, options), workers) as side:
                found[cell] = statistics.median(workers.ask("gate")) * 1e6 if kind == "gate" else p50(side, calls)
    return found


def p50(side: Any, calls: int) -> float:
    """Return the median µs of up to ``calls`` calls, and at least five; RuntimeError: a worker saw other weights."""
    rounds = [*side.rounds(5, 600.0), *side.rounds(calls - 5, SECONDS)]
    if wrong := [one.wrong for one in rounds if one.wrong]:
        raise RuntimeError(wrong[0])
    return statistics.median(one.seconds for one in rounds) * 1e6


def measure_here(cells: dict[str, list[str]]) -> None:
    """Measure the cells of some subjects in this process; print the µs of each cell."""
    preload = ["rich.table", "typer", "harness.sides", "collectors"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    forkserver.ensure_running()  # imports while this process imports
    import wsync

    where = str(Path(wsync.__file__).parents[1])
    assert where == os.getcwd(), f"wsync was imported from {where}"
    found = [measure(subject, names) for subject, names in cells.items()]
    print(json.dumps({cell: time_us for one in found for cell, time_us in one.items()}))


def measure_in(checkout: Path, cells: dict[str, list[str]]) -> dict[str, float]:
    """Measure the cells of some subjects in a fresh process in ``checkout``; return µs by cell; exit if it fails."""
    command = [sys.executable, str(HERE), str(checkout), "--measure", json.dumps(cells)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), str(HERE.parent)])}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=checkout, env=environment, start_new_session=True, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            output, errors = "", f"no answer within {TIMEOUT:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # workers that it may have left
    if process.returncode or not output:
        sys.exit(f"{', '.join(cells)} failed in {checkout}:\n{errors}")
    return json.loads(output.splitlines()[-1])


def compare(checkouts: list[Path], cells: dict[str, list[str]], runs: int, console: Console) -> list[Times]:
    """Return the times of each checkout by cell."""
    times = [defaultdict[str, list[float]](list) for _ in checkouts]
    for run in range(runs):
        began, order = time.monotonic(), list(zip(checkouts, times, strict=True))
        for subjects in PROCESSES:
            if mine := {subject: cells[subject] for subject in subjects if subject in cells}:
                for checkout, into in order if run % 2 == 0 else reversed(order):
                    for cell, time_us in measure_in(checkout, mine).items():
                        into[cell].append(time_us)
        console.print(f"run {run + 1} of {runs}: {time.monotonic() - began:.0f} s", highlight=False)
    return [*times]


def table_of(old: Times, new: Times, limit: float) -> tuple[Table, dict[str, float]]:
    """Return the table, and new/old by cell."""
    table, ratios = Table("cell", title="p50, median of the runs"), dict[str, float]()
    for heading in ("old µs", "new µs", "new / old"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cell in old:
        before, after = statistics.median(old[cell]), statistics.median(new[cell])
        ratios[cell] = after / before
        mark = " !" if ratios[cell] > limit else ""
        table.add_row(cell, f"{before:,.1f}", f"{after:,.1f}", f"{ratios[cell]:.2f}{mark}")
    return table, ratios


def check(checkout: Path) -> Path:
    """Return the path of a checkout; raise BadParameter if it is none, or its extension is missing."""
    if not (checkout / "wsync" / "__init__.py").exists():
        raise typer.BadParameter(f"{checkout} is no checkout of this repository")
    if not any((checkout / "wsync").glob("*.so")):
        raise typer.BadParameter(f"{checkout}/wsync has no compiled extension. There, run: {BUILD}")
    return checkout.resolve()


def main(
    old: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="A checkout.")],
    new: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Another.")] = HERE.parents[1],
    runs: Annotated[int, typer.Option(min=1, help="Runs of each cell in each checkout.")] = 5,
    cells: Annotated[str, typer.Option(help="A regular expression: of the cells to measure.")] = "",
    limit: Annotated[float, typer.Option(help="Of new/old.")] = 1.25,
    measure: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure OLD and NEW in alternation; fail if NEW is slower than the limit."""
    if measure:
        measure_here(json.loads(measure))
        return
    known = {subject: cells_of(subject) for subjects in PROCESSES for subject in subjects}
    found = {subject: [name for name in names if re.search(cells, name)] for subject, names in known.items()}
    if not (chosen := {subject: names for subject, names in found.items() if names}):
        raise typer.BadParameter(f"no cell matches {cells!r}: the subjects are {', '.join(known)}")
    console = Console(width=100)
    before, after = compare([check(old), check(new)], chosen, runs, console)
    table, ratios = table_of(before, after, limit)
    console.print(table)
    worst = max(ratios, key=ratios.__getitem__)
    last = f"worst {ratios[worst]:.2f} ({worst}), median {statistics.median(ratios.values()):.2f}"
    console.print(last, highlight=False)
    if ratios[worst] > limit:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
