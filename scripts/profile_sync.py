"""The cost of one small update, phase by phase, with warm and with cold caches.

    python scripts/profile_sync.py                                   # shared memory, published: 18 KiB to 2 workers
    python scripts/profile_sync.py --backend multiprocess --mib 1 --tensors 20
    python scripts/profile_sync.py --functions 25                    # and the functions in which the trainer spends it

The compiled code (``wsync/csrc``) and its Python twin, in turn. *warm*: updates one after another. *cold*: before each,
16 MiB and twenty thousand objects pass through the caches, as when a trainer learns or waits between two updates.
"""

from __future__ import annotations

import cProfile
import multiprocessing
import os
import pstats
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated, Any

import torch
import typer
from harness.backends import check, needs_cluster, variants
from harness.models import RevealingModel
from harness.processes import receive_updates, worker_processes
from rich.console import Console
from rich.table import Table

import wsync
from wsync import loops

Cost = dict[str, float]
Costs = tuple[Cost, Cost]
"""Microseconds of each phase, warm and cold."""

VARIANTS = {name: make for name, make in variants().items() if not needs_cluster(name)}


def stir(large: torch.Tensor) -> None:
    """Replace the contents of the caches."""
    large.add_(1.0)
    sum({str(number): number for number in range(20_000)}.values())


def measure(scheme: wsync.WeightSyncScheme, rounds: int, between: Callable[[], object]) -> Cost:
    """Return the median microseconds of each phase, and of all together."""
    reports = []
    for _ in range(rounds):
        between()
        report = scheme.send()
        assert report is not None
        reports.append(report)
    phases = {name: statistics.median(one.phases[name] for one in reports) * 1e6 for name in reports[0].phases}
    total = statistics.median(one.seconds for one in reports) * 1e6
    return {**phases, "all": total}


def profile(backend: str, mib: float, tensors: int, count: int, rounds: int, functions: int) -> Costs:
    """Measure updates in this process, warm and cold."""
    torch.set_num_threads(1)
    scheme, large = VARIANTS[backend](), torch.zeros(4 << 20)
    scheme.init_on_sender("policy", model=RevealingModel(mib, tensors), num_workers=count)
    with worker_processes(receive_updates, count, scheme, mib, tensors), scheme:
        scheme.connect()
        costs = measure(scheme, rounds, lambda: None), measure(scheme, max(1, rounds // 10), lambda: stir(large))
        if functions:
            profiler = cProfile.Profile()
            profiler.runcall(measure, scheme, rounds, lambda: None)
            pstats.Stats(profiler).sort_stats("tottime").print_stats(functions)
    return costs


def elsewhere(compiled: bool, *arguments: Any) -> Costs:
    """Call ``profile`` in a process of its own, which uses the compiled code or not, as its workers do."""
    os.environ["WSYNC_NATIVE"] = str(int(compiled))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as one:
        return one.submit(profile, *arguments).result()


def main(
    backend: Annotated[str, typer.Option(help=f"One of {', '.join(VARIANTS)}.")] = "shared_mem-published",
    mib: Annotated[float, typer.Option(help="MiB of all weights together.")] = 0.018,
    tensors: Annotated[int, typer.Option(min=1)] = 6,
    count: Annotated[int, typer.Option("--workers", min=1)] = 2,
    rounds: Annotated[int, typer.Option(min=1)] = 1000,
    turns: Annotated[int, typer.Option(min=1, help="Each way in turn, so often; medians are shown.")] = 3,
    functions: Annotated[int, typer.Option(help="Show so many functions by their own time, for each way.")] = 0,
) -> None:
    """Measure, and show."""
    check([backend], VARIANTS)
    ways = (True, False) if loops.COMPILED else (False,)
    taken: dict[bool, list[Costs]] = {way: [] for way in ways}
    for turn in range(turns):
        for way in ways:
            last = functions if turn == turns - 1 else 0
            taken[way].append(elsewhere(way, backend, mib, tensors, count, rounds, last))
    columns = {
        (f"{'compiled' if way else 'Python'}, {state}"): middle([costs[place] for costs in taken[way]])
        for place, state in enumerate(("warm", "cold"))
        for way in ways
    }
    shown = Table(f"{backend}, {mib:g} MiB in {tensors} tensors to {count}; µs, p50", *columns, box=None)
    for column in shown.columns[1:]:
        column.justify = "right"
    for name in next(iter(columns.values())):
        shown.add_row(name, *(f"{cost[name]:.1f}" for cost in columns.values()))
    if len(ways) == 2:
        warm, long_warm, cold, long_cold = (cost["all"] for cost in columns.values())
        shown.add_row("Python / compiled", f"{long_warm / warm:.1f} ×", "", f"{long_cold / cold:.1f} ×", "")
    Console().print(shown)


def middle(costs: list[Cost]) -> Cost:
    """Return the median of each phase over the turns."""
    return {name: statistics.median(cost[name] for cost in costs) for name in costs[0]}


if __name__ == "__main__":
    typer.run(main)
