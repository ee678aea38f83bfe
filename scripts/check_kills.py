"""Kill collecting workers at random, many times, while the trainer collects and updates without a pause.

Kills (SIGKILL, at random times) hit workers while they act, wait, install weights and restart. Checked are: the run
ends; every kill is followed by one restart; the frame count is that of the batches; the version that acts never goes
back at a worker index, over all its restarts; a synchronous batch is never acted with an older version than that of the
last update; there are no more descriptors, threads and children than before.

    python scripts/check_kills.py                      # 200 kills with each kind of collector, shared memory
    python scripts/check_kills.py --backend ray --kills 20
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from check_torn import Tally
from harness import backends
from harness.backends import collector_class
from harness.models import ConstantEnv, fill, revealing_policy
from rich.console import Console
from rich.progress import track
from rich.table import Table

from wsync import WeightSyncScheme

BACKENDS = tuple(name for name in backends.BACKENDS if name != "rpc")  # RPC's workers cannot be restarted


def open_now() -> tuple[int, int, int]:
    """Return the numbers of descriptors, threads and children of this process."""
    gc.collect()  # a memory map keeps a descriptor
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    names = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    # The arena may have grown; and a restarted TCP worker has its batches in shared memory.
    kept = [name for name in names if "memfd:wsync-" not in name]
    return len(kept), threading.active_count(), len(children)


class Run:
    """A collector of which workers are killed: the counts of frames by worker index, of kills, and of batches."""

    def __init__(self, backend: str, sync: bool, workers: int, kills: int) -> None:
        self.tally, self.kills, self.batches, self.longest = Tally(), 0, 0, 0.0  # seconds of the longest batch
        self._policy, self._sync = revealing_policy(0.125), sync
        self._scheme = WeightSyncScheme.from_backend(backend)
        self._pids = dict[float, int]()  # by worker index, as the last batches have them
        self.collector = collector_class(backend, sync)(
            [partial(ConstantEnv, np.array([worker])) for worker in range(workers)],
            self._policy,
            frames_per_batch=64 * workers if sync else 64,
            weight_sync_schemes={"policy": self._scheme},
            on_worker_failure="restart",
            max_restarts=kills + 1,
        )

    def turn(self) -> None:
        """Collect a batch, check its frames, and update the workers."""
        before, floor = time.monotonic(), self._scheme.version if self._sync else 0
        batch = next(self.collector)
        self.longest = max(self.longest, time.monotonic() - before)
        self.batches += 1
        workers = batch["observation"].flatten().tolist()
        self.tally.count_batch(batch, [floor] * len(workers), workers)
        self._pids.update(zip(workers, batch["process"].flatten().tolist(), strict=True))
        fill(self._policy, self._scheme.version + 1)
        self.collector.update_policy_weights_()
        self.tally.updates += 1

    def kill(self, count: int, pause: float, seed: int, ended: threading.Event) -> None:
        """Kill ``count`` workers, one after the other, at random times, ``pause`` seconds apart on average."""
        chance, killed = random.Random(seed), set[int]()
        while self.kills < count and not ended.wait(chance.expovariate(1 / pause)):
            own = [one.process.pid for one in self.collector.remote_workers if one.process is not None]
            if alive := sorted({*own, *list(self._pids.values())} - killed - {None}):
                victim = chance.choice(alive)
                killed.add(victim)
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                    self.kills += 1


def check(backend: str, sync: bool, *, kills: int, workers: int, pause: float, seed: int) -> Run:
    """Run once; AssertionError: a count is wrong; WeightSyncError: the collector has raised a failure."""
    run, ended = Run(backend, sync, workers, kills), threading.Event()
    with run.collector as collector:
        run.turn()
        before, started = open_now(), time.monotonic()
        killer = threading.Thread(target=run.kill, args=(kills, pause, seed, ended), daemon=True)
        killer.start()
        try:
            while killer.is_alive():
                run.turn()
        finally:
            ended.set()
            killer.join()
        deadline, failures = time.monotonic() + 60.0, collector.failures
        while failures.failed.total() < run.kills or len(collector.remote_workers) < workers:
            run.turn()
            assert time.monotonic() < deadline, f"{run.kills} kills, but {failures}"
        back: set[int] = set()  # workers that have delivered again
        while len(back) < workers:
            mark = dict(run.tally.latest)
            run.turn()
            back |= {index for index, version in run.tally.latest.items() if version != mark.get(index)}
            assert time.monotonic() < deadline, f"only worker(s) {back} deliver"
        run.tally.seconds = time.monotonic() - started
        # A replacement that is killed before it has joined is not counted as restarted.
        assert failures.restarted.total() <= failures.failed.total() == run.kills, f"{run.kills} kills: {failures}"
        assert collector.frames == run.tally.forwards, f"{collector.frames} frames counted, not {run.tally.forwards}"
        after = open_now()
        less = backend == "ray" or all(now <= then for now, then in zip(after, before, strict=True))  # Ray's vary
        assert less, f"descriptors, threads, children: {before} before, {after} after"
    return run


def main(
    backend: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(BACKENDS)}; else shared_mem.")] = None,
    kills: Annotated[int, typer.Option(min=1, help="Kills in each run.")] = 200,
    workers: Annotated[int, typer.Option(min=1, help="Workers.")] = 2,
    pause: Annotated[float, typer.Option(min=0.001, help="Mean seconds between two kills.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Of the kills.")] = 0,
) -> None:
    """Kill workers at random; fail if a count is wrong."""
    logging.basicConfig(level=logging.ERROR)  # a line for each kill is too many
    chosen = backend or ["shared_mem"]
    backends.check(chosen, BACKENDS)
    table = Table(title=f"{workers} workers, a kill every {pause:g} s on average")
    columns = ("backend", "collector", "kills", "batches", "frames", "updates", "torn", "went back", "stale")
    for column in (*columns, "longest batch", "s"):
        table.add_column(column, justify="left" if column in columns[:2] else "right", no_wrap=True)
    bad, console, runs = False, Console(width=140), list(product(chosen, (True, False)))
    for name, sync in track(runs, f"{kills} kills each", console=console, transient=True):
        run = check(name, sync, kills=kills, workers=workers, pause=pause, seed=seed)
        tally = run.tally
        counts = run.kills, run.batches, tally.forwards, tally.updates, tally.mixed, tally.backwards, tally.stale
        last = (f"{run.longest * 1e3:.0f} ms", f"{tally.seconds:.0f}")
        table.add_row(name, "sync" if sync else "async", *(f"{count:,}" for count in counts), *last)
        bad |= bool(tally.example)
    console.print(table)
    if bad:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
