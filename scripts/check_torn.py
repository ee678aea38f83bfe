"""Look for torn policies: workers forward without a pause while the trainer sends as fast as it can.

Every weight of version v is filled with the number v, and a forward reports the smallest and the largest number of all
weights. So each forward shows whether it used one version (*mixed* if not), whether versions went back, and whether it
used a version older than one for which ``send`` had returned before the forward began (*stale*).

    python scripts/check_torn.py --forwards 1000000                       # plain processes: all but rpc and ray
    python scripts/check_torn.py --forwards 1000000 --collector           # every backend, inside a collector
    python scripts/check_torn.py --bypass-gate --mib 8                    # the control, which does see mixed versions
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from harness.backends import check, collector_class, needs_cluster, variants
from harness.models import ConstantEnv, RevealingModel, fill, revealing_policy
from harness.processes import worker_processes
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tensordict import TensorDictBase
from torch import nn

import wsync

BACKENDS = variants()
STANDALONE = [name for name in BACKENDS if not needs_cluster(name)]
MakeScheme = Callable[[], wsync.WeightSyncScheme]


@dataclass
class Tally:
    """Counts of what workers have seen; ``example`` is the first forward that broke a promise."""

    forwards: int = 0
    versions: int = 0
    mixed: int = 0
    backwards: int = 0
    stale: int = 0
    updates: int = 0
    seconds: float = 0.0
    example: str = ""
    latest: dict[int, float] = field(default_factory=dict)  # by worker, the newest version that it has seen

    def count(self, low: float, high: float, floor: float, worker: int) -> None:
        """Count one forward of ``worker`` that began when ``floor`` was the newest version that had been sent."""
        latest = self.latest.get(worker, 0.0)
        self.forwards += 1
        self.versions += high > latest
        faults = (low != high, low < latest, low < floor)
        self.mixed += faults[0]
        self.backwards += faults[1]
        self.stale += faults[2]
        if any(faults):
            seen = f"worker {worker} saw versions {low:.0f} to {high:.0f}, after {latest:.0f}, floor {floor:.0f}"
            self.example = self.example or seen
        self.latest[worker] = high

    def count_batch(self, batch: TensorDictBase, floors: Iterable[float], workers: Iterable[int]) -> None:
        """Count every frame of a batch, those of a worker in order of time; ``policy_version`` must have acted."""
        reveal = torch.cat([batch["reveal"], batch["policy_version"].unsqueeze(-1).float()], -1).flatten(0, -2)
        for frame in zip(reveal.amin(-1).tolist(), reveal.amax(-1).tolist(), floors, workers, strict=True):
            self.count(*frame)

    def add(self, other: Tally) -> None:
        """Add the counts of another worker."""
        for name in ("forwards", "versions", "mixed", "backwards", "stale"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.example = self.example or other.example


@contextmanager
def version_floor() -> Iterator[tuple[Path, np.ndarray]]:
    """A number in a file that all processes map: the newest version for which ``send`` has returned."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "floor"
        path.write_bytes(bytes(8))
        yield path, np.memmap(path, np.int64, "r+")


def send_next(model: nn.Module, scheme: wsync.WeightSyncScheme, floor: np.ndarray, weights: Any = None) -> None:
    """Send the next version, and store it as the floor."""
    version = scheme.version + 1
    fill(model, version)
    scheme.send(weights)
    floor[0] = version


def _forward(channel: Connection, worker: int, scheme: wsync.WeightSyncScheme, options: dict[str, Any]) -> None:
    """Forward until there were enough forwards, or the time is over; then report, and stay for the last sends."""
    model, tally = RevealingModel(options["mib"], buffer=True), Tally()
    floor = np.memmap(options["floor"], np.int64, "r")
    with scheme:
        scheme.init_on_receiver("policy", model=model, worker_idx=worker)
        scheme.connect()
        forward = partial(RevealingModel.forward, model) if options["bypass"] else model
        deadline = time.monotonic() + options["seconds"]
        while tally.forwards < options["forwards"] and time.monotonic() < deadline:
            known = int(floor[0])  # before the forward begins
            low, high = forward().tolist()
            tally.count(low, high, known, worker)
            if options["bypass"] and tally.mixed >= 10:
                break  # the control has seen enough
        channel.send(tally)
        channel.recv()


def standalone(
    make: MakeScheme, *, forwards: int, workers: int, mib: float, seconds: float, bypass: bool = False
) -> Tally:
    """Check a scheme with plain worker processes; ``bypass`` calls the class's own ``forward``, around the gate."""
    model, total = RevealingModel(mib, buffer=True), Tally()
    with version_floor() as (path, floor), make() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=workers)
        options = {"mib": mib, "floor": path, "forwards": -(-forwards // workers), "seconds": seconds, "bypass": bypass}
        with worker_processes(_forward, workers, scheme, options) as channels:
            scheme.connect()
            started, waiting = time.monotonic(), set(channels.pipes)
            while waiting:
                send_next(model, scheme, floor)
                total.updates += 1
                for channel in wait(list(waiting), timeout=0):
                    assert isinstance(channel, Connection)
                    total.add(channel.recv())
                    waiting.discard(channel)
            total.seconds = time.monotonic() - started
            channels.send("end")
    return total


class FloorEnv(ConstantEnv):
    """Its observation is the floor: the newest version for which ``send`` has returned before the next forward."""

    def __init__(self, floor: Path) -> None:
        super().__init__(np.memmap(floor, np.int64, "r"))


def in_collector(make: MakeScheme, *, forwards: int, workers: int, mib: float, seconds: float) -> Tally:
    """Check a scheme in an asynchronous collector."""
    scheme, policy, total = make(), revealing_policy(mib, buffer=True), Tally()
    fill(policy, int(scheme.delivers_at_connect))  # the workers begin with version 1, or with none
    learner = revealing_policy(mib, buffer=True)  # the collector's own policy stays as it is
    stop = threading.Event()
    with (
        version_floor() as (path, floor),
        collector_class(scheme.name, sync=False)(
            [partial(FloorEnv, path)] * workers, policy, frames_per_batch=200, weight_sync_schemes={"policy": scheme}
        ) as collector,
        ThreadPoolExecutor() as sender,
    ):

        def keep_sending() -> None:
            while not stop.is_set():
                send_next(learner, scheme, floor, learner)
                total.updates += 1

        started, sending = time.monotonic(), sender.submit(keep_sending)
        try:
            while total.forwards < forwards and time.monotonic() - started < seconds and not sending.done():
                batch = next(collector)
                total.count_batch(batch, batch["observation"].flatten().tolist(), batch["process"].flatten().tolist())
        finally:
            stop.set()
        sending.result()
        total.seconds = time.monotonic() - started
    return total


def main(
    backend: Annotated[
        list[str] | None, typer.Option(help="All by default; rpc and ray only with --collector.")
    ] = None,
    forwards: Annotated[int, typer.Option(min=1, help="Forwards in all, over the backends.")] = 1_000_000,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    mib: Annotated[float, typer.Option(help="MiB of weights.")] = 1.0,
    seconds: Annotated[float, typer.Option(help="Seconds for each backend, at the most.")] = 600.0,
    collector: Annotated[bool, typer.Option("--collector/--standalone", help="Inside a collector.")] = False,
    bypass_gate: Annotated[bool, typer.Option("--bypass-gate", help="The control: the ungated forward.")] = False,
) -> None:
    """Count forwards that saw two versions, an older one than before, or an older one than was sent."""
    if collector and bypass_gate:
        raise typer.BadParameter("a collector's workers always act through the gate")
    known = list(BACKENDS) if collector else STANDALONE
    chosen = backend or known
    check(chosen, known)
    table = Table(title=f"{'collector' if collector else 'standalone'}, {workers} workers, {mib:g} MiB")
    for column in ("backend", "forwards", "sends", "versions seen", "mixed", "went back", "stale", "s"):
        table.add_column(column, justify="left" if column == "backend" else "right", no_wrap=True)
    bad, console = list[str](), Console(width=110)
    options: Any = {"forwards": -(-forwards // len(chosen)), "workers": workers, "mib": mib, "seconds": seconds}
    check_one = in_collector if collector else partial(standalone, bypass=bypass_gate)
    for name in track(chosen, "backends", console=console, transient=True):
        tally = check_one(BACKENDS[name], **options)
        counts = (tally.forwards, tally.updates, tally.versions, tally.mixed, tally.backwards, tally.stale)
        table.add_row(name, *(f"{count:,}" for count in counts), f"{tally.seconds:.1f}")
        bad += [f"{name}: {tally.example}"] if tally.example else []
    console.print(table)
    for line in bad:
        console.print(line, highlight=False)
    if bad and not bypass_gate:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
