"""Where the microseconds of one small update go, phase by phase, with caches that are warm and that are not.

    python scripts/profile_sync.py                                   # shared memory, published: 18 KiB to 2 workers
    python scripts/profile_sync.py --backend multiprocess --mib 1 --tensors 20
    python scripts/profile_sync.py --functions 25                    # and the functions that the trainer spends it in

*warm*: updates one behind another. *cold*: before each, 16 MiB and twenty thousand objects go through the caches, as
they do where a trainer learns or waits between two updates.
"""

from __future__ import annotations

import cProfile
import multiprocessing
import pstats
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import wsync

SCHEMES: dict[str, Callable[[], wsync.WeightSyncScheme]] = {
    "published": partial(wsync.SharedMemWeightSyncScheme, acknowledge="published"),
    "installed": wsync.SharedMemWeightSyncScheme,
    "multiprocess": wsync.MultiProcessWeightSyncScheme,
    "distributed": wsync.DistributedWeightSyncScheme,
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


def measure(scheme: wsync.WeightSyncScheme, rounds: int, between: Callable[[], object]) -> dict[str, float]:
    """Median microseconds of each phase, of what is left, and of all."""
    reports = []
    for _ in range(rounds):
        between()
        report = scheme.send()
        assert report is not None
        reports.append(report)
    phases = {name: statistics.median(one.phases[name] for one in reports) * 1e6 for name in reports[0].phases}
    total = statistics.median(one.seconds for one in reports) * 1e6
    return {**phases, "between the phases": max(0.0, total - sum(phases.values())), "all": total}


def main(
    backend: Annotated[str, typer.Option(help=f"One of {', '.join(SCHEMES)}.")] = "published",
    mib: Annotated[float, typer.Option(help="MiB of all weights together.")] = 0.018,
    tensors: Annotated[int, typer.Option(min=1)] = 6,
    count: Annotated[int, typer.Option("--workers", min=1)] = 2,
    rounds: Annotated[int, typer.Option(min=1)] = 2000,
    functions: Annotated[int, typer.Option(help="Show so many functions by their own time.")] = 0,
) -> None:
    """Measure, and show."""
    if backend not in SCHEMES:
        raise typer.BadParameter(f"no backend '{backend}'; there are {', '.join(SCHEMES)}")
    torch.set_num_threads(1)
    scheme, large = SCHEMES[backend](), torch.zeros(4 << 20)
    scheme.init_on_sender("policy", model=model(mib, tensors), num_workers=count)
    with workers(scheme, count, mib, tensors), scheme:
        warm = measure(scheme, rounds, lambda: None)
        cold = measure(scheme, max(1, rounds // 10), lambda: stir(large))
        profile = cProfile.Profile()
        if functions:
            profile.runcall(measure, scheme, rounds, lambda: None)
    shown = Table(f"{backend}, {mib:g} MiB in {tensors} tensors to {count}; µs, p50", "warm", "cold", box=None)
    for column in shown.columns[1:]:
        column.justify = "right"
    for name in warm:
        shown.add_row(name, f"{warm[name]:.1f}", f"{cold[name]:.1f}")
    Console().print(shown)
    if functions:
        pstats.Stats(profile).sort_stats("tottime").print_stats(functions)


if __name__ == "__main__":
    typer.run(main)
