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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from harness import torn
from harness.backends import BACKENDS as ALL_BACKENDS
from harness.backends import check as check_names
from harness.backends import collector_class
from harness.console import progress_bar
from harness.models import ConstantEnv, RevealingPolicy, fill
from rich.console import Console
from rich.table import Table
from tensordict import TensorDictBase

from wsync import WeightSyncScheme

BACKENDS = tuple(name for name in ALL_BACKENDS if name != "rpc")  # RPC's workers cannot be restarted
WRONG = ("torn", "went back", "stale")
"""The kinds of error that a frame may have."""
_TIMEOUT = 60.0  # seconds in which all workers have to be active again at the end


@dataclass
class Tally(torn.Tally):
    """Counts of a run; workers are counted by index.

    Attributes:
        kills: workers that were killed.
        batches: batches that were collected.
        longest: seconds of the longest batch.
    """

    kills: int = 0
    batches: int = 0
    longest: float = 0.0

    def check(self, batch: TensorDictBase, floor: int) -> None:
        """Check a batch: all frames must be acted with version ``floor`` or a newer one."""
        self.batches += 1
        workers = batch.get("observation").flatten().int().tolist()
        self.count_batch(batch, [floor] * len(workers), workers)

    @property
    def wrong(self) -> tuple[int, int, int]:
        """Numbers of the frames with each of ``WRONG``."""
        return self.mixed, self.backwards, self.stale


class Killer(threading.Thread):
    """Kills ``kills`` workers, one after the other, at random times.

    Args:
        victims: returns the current worker processes.
        kills: number of kills.
        pause: mean seconds between two kills.
        seed: the seed of the times and victims.
    """

    def __init__(self, victims: Callable[[], list[int]], kills: int, pause: float, seed: int) -> None:
        super().__init__(daemon=True)
        self.done = 0
        self._victims = victims
        self._kills, self._pause, self._rng = kills, pause, random.Random(seed)
        self._ended = threading.Event()

    def run(self) -> None:
        """Kill."""
        killed: set[int] = set()
        while self.done < self._kills and not self._ended.wait(self._rng.expovariate(1 / self._pause)):
            alive = sorted(set(self._victims()) - killed)
            if not alive:
                continue
            victim = self._rng.choice(alive)
            killed.add(victim)
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.done += 1

    def end(self) -> None:
        """Stop killing."""
        self._ended.set()
        self.join()


def open_now() -> tuple[int, int, int]:
    """Return the numbers of descriptors, threads and children of this process."""
    gc.collect()  # a memory map keeps a descriptor
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    names = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    # The arena may have grown; and a restarted TCP worker has its batches in shared memory.
    kept = [name for name in names if "memfd:wsync-" not in name]
    return len(kept), threading.active_count(), len(children)


def check(
    backend: str, sync: bool, *, kills: int, workers: int, pause: float, seed: int, tell: Callable[..., object]
) -> Tally:
    """Run once; ``tell(completed=…)`` is called with the number of kills.

    Raises:
        AssertionError: a count is wrong.
        wsync.WeightSyncError: the collector has raised a failure.
    """
    policy, tally, seen = RevealingPolicy(0.125), Tally(), {}
    scheme = WeightSyncScheme.from_backend(backend)
    with collector_class(backend, sync)(
        [partial(ConstantEnv, np.array([worker])) for worker in range(workers)],
        policy,
        frames_per_batch=64 * workers if sync else 64,
        weight_sync_schemes={"policy": scheme},
        on_worker_failure="restart",
        max_restarts=kills + 1,
    ) as collector:

        def victims() -> list[int]:
            own = [one.process.pid for one in collector.remote_workers if one.process is not None]
            return [pid for pid in (*own, *list(seen.values())) if pid]

        def turn() -> None:
            before, floor = time.monotonic(), scheme.version if sync else 0
            batch = next(collector)
            tally.longest = max(tally.longest, time.monotonic() - before)
            tally.check(batch, floor)
            seen.update(zip(batch["observation"].flatten().tolist(), batch["process"].flatten().tolist(), strict=True))
            fill(policy, scheme.version + 1)
            collector.update_policy_weights_()
            tally.updates += 1

        turn()
        before, started = open_now(), time.monotonic()
        killer = Killer(victims, kills, pause, seed)
        killer.start()
        while killer.is_alive():
            turn()
            tell(completed=killer.done)
        killer.end()
        tally.kills, deadline, failures = killer.done, time.monotonic() + _TIMEOUT, collector.failures
        while failures.failed.total() < killer.done or len(collector.remote_workers) < workers:
            turn()
            assert time.monotonic() < deadline, f"{killer.done} kills, but {failures}"
        back: set[int] = set()  # workers that have delivered again
        while len(back) < workers:
            mark = dict(tally.latest)
            turn()
            back |= {index for index, version in tally.latest.items() if version != mark.get(index)}
            assert time.monotonic() < deadline, f"only worker(s) {back} deliver"
        tally.seconds = time.monotonic() - started
        # A replacement that is killed before it has joined is not counted as restarted.
        assert failures.restarted.total() <= failures.failed.total() == killer.done, f"{killer.done} kills: {failures}"
        assert collector.frames == tally.forwards, f"{collector.frames} frames counted, {tally.forwards} delivered"
        after = open_now()
        less = backend == "ray" or all(now <= then for now, then in zip(after, before, strict=True))  # Ray's vary
        assert less, f"descriptors, threads, children: {before} before, {after} after"
    return tally


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
    check_names(chosen, BACKENDS)
    table = Table(title=f"{workers} workers, a kill every {pause:g} s on average")
    columns = ("backend", "collector", "kills", "batches", "frames", "updates", *WRONG)
    for column in (*columns, "longest batch", "s"):
        table.add_column(column, justify="left" if column in columns[:2] else "right", no_wrap=True)
    bad, console = 0, Console(width=140)
    for name in chosen:
        for sync in (True, False):
            how = "sync" if sync else "async"
            with progress_bar(console) as progress:
                task = progress.add_task(f"kills, {name}, {how}", total=kills)
                tell = partial(progress.update, task)
                tally = check(name, sync, kills=kills, workers=workers, pause=pause, seed=seed, tell=tell)
            counts = (tally.kills, tally.batches, tally.forwards, tally.updates, *tally.wrong)
            last = (f"{tally.longest * 1e3:.0f} ms", f"{tally.seconds:.0f}")
            table.add_row(name, how, *(f"{count:,}" for count in counts), *last)
            bad += tally.faults
    console.print(table)
    if bad:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
