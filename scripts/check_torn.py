"""Look for torn policies: workers forward without a pause while the trainer sends as fast as it can.

Every weight of version v is filled with the number v, and a forward reports the smallest and the largest number of all
weights. So each forward shows whether it used one version (*mixed* if not), whether versions went back, and whether it
used a version older than one for which ``send`` had returned before the forward began (*stale*).

    python scripts/check_torn.py --forwards 1000000                       # plain processes: all but rpc and ray
    python scripts/check_torn.py --forwards 1000000 --collector           # every backend, inside a collector
    python scripts/check_torn.py --bypass-gate --mib 8                    # the control, which does see mixed versions
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer
from harness.backends import check, needs_cluster, variants
from harness.console import progress_bar
from harness.torn import Tally, in_collector, standalone
from rich.console import Console
from rich.table import Table

BACKENDS = variants()
STANDALONE = [name for name in BACKENDS if not needs_cluster(name)]
__all__ = ["BACKENDS", "STANDALONE", "Tally", "in_collector", "standalone"]


def main(
    backend: Annotated[
        list[str] | None, typer.Option(help="All by default; rpc and ray only with --collector.")
    ] = None,
    forwards: Annotated[int, typer.Option(min=1, help="Forwards in all, over the backends.")] = 1_000_000,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    mib: Annotated[float, typer.Option(help="MiB of weights.")] = 1.0,
    seconds: Annotated[float, typer.Option(help="Seconds for each backend, at the most.")] = 600.0,
    collector: Annotated[bool, typer.Option("--collector/--standalone", help="Inside a collector.")] = False,
    bypass_gate: Annotated[bool, typer.Option("--bypass-gate", help="The control: call model.forward.")] = False,
) -> None:
    """Count forwards that saw two versions, an older one than before, or an older one than was sent."""
    if collector and bypass_gate:
        raise typer.BadParameter("a collector's workers always act through the gate")
    known = list(BACKENDS) if collector else STANDALONE
    chosen = backend or known
    check(chosen, known)
    share = -(-forwards // len(chosen))
    table = Table(title=f"{'collector' if collector else 'standalone'}, {workers} workers, {mib:g} MiB")
    for column in ("backend", "forwards", "sends", "versions seen", "mixed", "went back", "stale", "s"):
        table.add_column(column, justify="left" if column == "backend" else "right", no_wrap=True)
    bad, console = list[str](), Console(width=110)
    options = {"forwards": share, "workers": workers, "mib": mib, "seconds": seconds}
    for name in chosen:
        with progress_bar(console) as progress:
            task = progress.add_task(name, total=share if collector else None)  # standalone reports at the end only
            if collector:
                tally = in_collector(BACKENDS[name], **options, tell=partial(progress.update, task))
            else:
                tally = standalone(BACKENDS[name], **options, bypass=bypass_gate)
        counts = (tally.forwards, tally.updates, tally.versions, tally.mixed, tally.backwards, tally.stale)
        table.add_row(name, *(f"{count:,}" for count in counts), f"{tally.seconds:.1f}")
        if tally.example:
            bad.append(f"{name}: {tally.example}")
    console.print(table)
    for line in bad:
        console.print(line, highlight=False)
    if bad and not bypass_gate:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
