"""The cost of one small update, phase by phase, with warm and with cold caches.

    python scripts/profile_sync.py                                   # shared memory, published: 18 KiB to 2 workers
    python scripts/profile_sync.py --backend multiprocess --mib 1 --tensors 20
    python scripts/profile_sync.py --functions 25                    # and the functions in which the trainer spends it

*warm*: updates one after another. *cold*: before each, 16 MiB and twenty thousand objects pass through the caches, as
when a trainer learns or waits between two updates.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from harness.backends import check, needs_cluster, variants
from harness.models import RevealingModel
from harness.processes import receive_updates, worker_processes
from rich.console import Console
from rich.table import Table

import wsync

VARIANTS = {name: make for name, make in variants().items() if not needs_cluster(name)}


def measure(scheme: wsync.WeightSyncScheme, rounds: int, between: Callable[[], object]) -> dict[str, float]:
    """Return the median microseconds of each phase, and of all together."""
    reports = list[wsync.SyncReport]()
    for _ in range(rounds):
        between()
        report = scheme.send()
        assert report is not None
        reports.append(report)
    found = {name: statistics.median(one.phases[name] for one in reports) * 1e6 for name in reports[0].phases}
    return {**found, "all": statistics.median(one.seconds for one in reports) * 1e6}


def main(
    backend: Annotated[str, typer.Option(help=f"One of {', '.join(VARIANTS)}.")] = "shared_mem-published",
    mib: Annotated[float, typer.Option(help="MiB of all weights together.")] = 0.018,
    tensors: Annotated[int, typer.Option(min=1)] = 6,
    count: Annotated[int, typer.Option("--workers", min=1)] = 2,
    rounds: Annotated[int, typer.Option(min=1)] = 1000,
    functions: Annotated[int, typer.Option(help="Show so many functions by their own time.")] = 0,
) -> None:
    """Measure, and show."""
    check([backend], VARIANTS)
    torch.set_num_threads(1)
    scheme, large = VARIANTS[backend](), torch.zeros(4 << 20)
    scheme.init_on_sender("policy", model=RevealingModel(mib, tensors), num_workers=count)

    def stir() -> None:
        large.add_(1.0)
        sum({str(number): number for number in range(20_000)}.values())

    with worker_processes(receive_updates, count, scheme, mib, tensors), scheme:
        scheme.connect()
        warm, cold = measure(scheme, rounds, lambda: None), measure(scheme, max(1, rounds // 10), stir)
        if functions:
            profiler = cProfile.Profile()
            profiler.runcall(measure, scheme, rounds, lambda: None)
            pstats.Stats(profiler).sort_stats("tottime").print_stats(functions)
    table = Table(f"{backend}, {mib:g} MiB in {tensors} tensors to {count}; µs, p50", "warm", "cold", box=None)
    for name, time_us in warm.items():
        table.add_row(name, f"{time_us:.1f}", f"{cold[name]:.1f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
