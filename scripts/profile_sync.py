"""Where the microseconds of one small update go, phase by phase, with caches that are warm and that are not.

    python scripts/profile_sync.py                                   # shared memory, published: 18 KiB to 2 workers
    python scripts/profile_sync.py --backend multiprocess --mib 1 --tensors 20
    python scripts/profile_sync.py --functions 25                    # and the functions that the trainer spends it in

The compiled fast path (``wsync/csrc``) and the slow one, in Python, in turn. *warm*: updates one behind another.
*cold*: before each, 16 MiB and twenty thousand objects go through the caches, as they do where a trainer learns or
waits between two updates.
"""

from __future__ import annotations

import cProfile
import multiprocessing
import os
import pstats
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import wsync
from wsync import native

Cost = dict[str, float]
Costs = tuple[Cost, Cost]
"""Warm, and cold: microseconds of each phase."""

SCHEMES: dict[str, Callable[[], wsync.WeightSyncScheme]] = {
    "published": partial(wsync.SharedMemWeightSyncScheme, acknowledge="published"),
    "installed": wsync.SharedMemWeightSyncScheme,
    "multiprocess": wsync.MultiProcessWeightSyncScheme,
    "distributed": wsync.DistributedWeightSyncScheme,
    "distributed, gloo": partial(wsync.DistributedWeightSyncScheme, shared_memory=False),
}


def model(mib: float, tensors: int) -> nn.Module:
    """So many parameters of one size."""
    size = max(1, int(mib * 2**18 / tensors))
    return nn.ParameterList([nn.Parameter(torch.zeros(size)) for _ in range(tensors)])


def worker(pipe: Connection, scheme: wsync.WeightSyncScheme, index: int, mib: float, tensors: int) -> None:
    """Be there until the trainer hangs up."""
    torch.set_num_threads(1)
    scheme.init_on_receiver("policy", model=model(mib, tensors), worker_idx=index)
    scheme.connect()
    try:
        pipe.recv()
    except EOFError:
        scheme.shutdown()


@contextmanager
def workers(scheme: wsync.WeightSyncScheme, count: int, mib: float, tensors: int) -> Iterator[None]:
    """Workers that have connected."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for index in range(count):
        mine, theirs = context.Pipe()
        process = context.Process(target=worker, args=(theirs, scheme, index, mib, tensors), daemon=True)
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    scheme.connect()
    try:
        yield
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(10)


def stir(large: torch.Tensor) -> None:
    """Send something else through the caches."""
    large.add_(1.0)
    sum({str(number): number for number in range(20_000)}.values())


def measure(scheme: wsync.WeightSyncScheme, rounds: int, between: Callable[[], object]) -> Cost:
    """Median microseconds of each phase, and of all."""
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
    """What an update costs in this process, warm and cold."""
    torch.set_num_threads(1)
    scheme, large = SCHEMES[backend](), torch.zeros(4 << 20)
    scheme.init_on_sender("policy", model=model(mib, tensors), num_workers=count)
    with workers(scheme, count, mib, tensors), scheme:
        costs = measure(scheme, rounds, lambda: None), measure(scheme, max(1, rounds // 10), lambda: stir(large))
        if functions:
            profiler = cProfile.Profile()
            profiler.runcall(measure, scheme, rounds, lambda: None)
            pstats.Stats(profiler).sort_stats("tottime").print_stats(functions)
    return costs


def elsewhere(compiled: bool, *arguments: Any) -> Costs:
    """``profile`` in a process of its own, which takes the compiled path or not; and so do its workers."""
    os.environ["WSYNC_NATIVE"] = str(int(compiled))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as one:
        return one.submit(profile, *arguments).result()


def main(
    backend: Annotated[str, typer.Option(help=f"One of {', '.join(SCHEMES)}.")] = "published",
    mib: Annotated[float, typer.Option(help="MiB of all weights together.")] = 0.018,
    tensors: Annotated[int, typer.Option(min=1)] = 6,
    count: Annotated[int, typer.Option("--workers", min=1)] = 2,
    rounds: Annotated[int, typer.Option(min=1)] = 1000,
    turns: Annotated[int, typer.Option(min=1, help="Each way in turn, so often; medians are shown.")] = 3,
    functions: Annotated[int, typer.Option(help="Show so many functions by their own time, for each way.")] = 0,
) -> None:
    """Measure, and show."""
    if backend not in SCHEMES:
        raise typer.BadParameter(f"no backend '{backend}'; there are {', '.join(SCHEMES)}")
    ways = (True, False) if native.available else (False,)
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
    """The median of each phase, over the turns."""
    return {name: statistics.median(cost[name] for cost in costs) for name in costs[0]}


if __name__ == "__main__":
    typer.run(main)
