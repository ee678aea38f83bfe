"""Kill collecting workers at random, many times, while the trainer gathers and updates without a pause.

Kills (SIGKILL, from a thread that knows nothing of what goes on) hit workers while they act, wait, install weights and
are being started anew. Checked are: the run ends; every kill has had one restart; frames are those of the batches; the
version that acted never goes back in a worker's place, over all who have had it; a synchronous batch is never acted
with an older version than the last update; descriptors, threads and children are no more than before.

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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import gymnasium
import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tensordict import TensorDictBase
from torch import nn

import collectors.distributed
from collectors import MultiAsyncCollector, MultiSyncCollector
from collectors.workers.processes import ProcessWorker
from wsync import WeightSyncScheme

REMOTE = {"distributed": "DistributedCollector", "ray": "RayCollector"}
BACKENDS = ("shared_mem", "multiprocess", *REMOTE)
_PATIENCE = 60.0  # seconds in which everybody has to be back at the end


class Placed(gymnasium.Env):
    """Its observation is the index of its worker."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, worker: int) -> None:
        self._observation = np.array([worker], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin."""
        super().reset(seed=seed)
        return self._observation, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Go on."""
        return self._observation, 0.0, False, False, {}


class Signed(nn.Module):
    """A policy that writes down its process, and the number that all its weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.ones(4096)) for _ in range(8))

    def forward(self, observation: TensorDictBase) -> TensorDictBase:
        """Write "action", "process" and "extremes"."""
        extremes = torch.stack([extreme for layer in self.layers for extreme in layer.aminmax()])
        observation.set("extremes", torch.stack([extremes.min(), extremes.max()]))
        observation.set("process", torch.tensor(os.getpid()))
        return observation.set("action", torch.tensor(0))

    @torch.no_grad()
    def become(self, version: int) -> None:
        """Fill every weight with ``version``."""
        for layer in self.layers:
            layer.fill_(version)


@dataclass
class Tally:
    """What was seen.

    Attributes:
        newest: by worker, the newest version that acted.
        wrong: frames that were not as they must be, by what was wrong.
    """

    kills: int = 0
    batches: int = 0
    frames: int = 0
    updates: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    newest: dict[int, int] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)

    def see(self, batch: TensorDictBase, floor: int) -> None:
        """Judge a batch, all of whose frames must be acted with version ``floor`` or newer."""
        self.batches += 1
        self.frames += batch.numel()
        columns: Any = batch
        versions, places = columns["policy_version"].flatten(), columns["observation"][..., 0].flatten()
        extremes = columns["extremes"].reshape(-1, 2)
        self._count("torn", int((extremes != versions.unsqueeze(-1)).any(-1).sum()))
        self._count("stale", int((versions < floor).sum()))
        for place in places.unique().int().tolist():
            mine = versions[places == place]
            back = int((mine.diff() < 0).sum()) + int(mine[0] < self.newest.get(place, 0))
            self._count("went back", back)
            self.newest[place] = int(mine[-1])

    def _count(self, what: str, number: int) -> None:
        self.wrong[what] = self.wrong.get(what, 0) + number


class Killer(threading.Thread):
    """Kills ``kills`` workers, one after the other, at random times.

    Args:
        victims: the processes that there are now.
        pause: mean seconds between two kills.
    """

    def __init__(self, victims: Callable[[], list[int]], kills: int, pause: float, seed: int) -> None:
        super().__init__(daemon=True)
        self.done = 0
        self._victims = victims
        self._kills, self._pause, self._dice = kills, pause, random.Random(seed)
        self._enough = threading.Event()

    def run(self) -> None:
        """Kill."""
        killed: set[int] = set()
        while self.done < self._kills and not self._enough.wait(self._dice.expovariate(1 / self._pause)):
            alive = sorted(set(self._victims()) - killed)
            if not alive:
                continue
            victim = self._dice.choice(alive)
            killed.add(victim)
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.done += 1

    def end(self) -> None:
        """Kill no more."""
        self._enough.set()
        self.join()


def open_now() -> tuple[int, int, int]:
    """Descriptors, threads and children of this process."""
    gc.collect()  # a memory map keeps a descriptor
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    names = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    kept = [name for name in names if "wsync-weights" not in name]  # the arena may have one slot more than before
    return len(kept), threading.active_count(), len(children)


def check(
    backend: str, sync: bool, *, kills: int, workers: int, pause: float, seed: int, tell: Callable[..., object]
) -> Tally:
    """One long run; ``tell(completed=…)`` hears how many were killed so far.

    Raises:
        AssertionError: something does not add up.
        wsync.WeightSyncError: the collector gave up.
    """
    policy, tally, seen = Signed(), Tally(), {}
    local = MultiSyncCollector if sync else MultiAsyncCollector
    kind: Any = partial(getattr(collectors.distributed, REMOTE[backend]), sync=sync) if backend in REMOTE else local
    scheme = WeightSyncScheme.from_backend(backend)
    with kind(
        [partial(Placed, worker) for worker in range(workers)],
        policy,
        frames_per_batch=64 * workers if sync else 64,
        weight_sync_schemes={"policy": scheme},
        on_worker_failure="restart",
        max_restarts=kills + 1,
    ) as collector:

        def victims() -> list[int]:
            own = [w.process.pid for w in list(collector.remote_workers) if isinstance(w, ProcessWorker)]
            return [pid for pid in (*own, *list(seen.values())) if pid]

        def turn() -> None:
            before, floor = time.monotonic(), scheme.version if sync else 0
            batch = next(collector)
            tally.longest = max(tally.longest, time.monotonic() - before)
            tally.see(batch, floor)
            seen.update(zip(batch["observation"].flatten().tolist(), batch["process"].flatten().tolist(), strict=True))
            policy.become(scheme.version + 1)
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
        tally.kills, deadline = killer.done, time.monotonic() + _PATIENCE
        failures = collector.failures
        while failures.restarted.total() < killer.done or len(collector.remote_workers) < workers:
            turn()
            assert time.monotonic() < deadline, f"{killer.done} kills, but {failures}"
        back: set[int] = set()  # everybody has delivered again
        while len(back) < workers:
            mark = dict(tally.newest)
            turn()
            back |= {place for place, version in tally.newest.items() if version != mark.get(place)}
            assert time.monotonic() < deadline, f"only worker(s) {back} deliver"
        tally.seconds = time.monotonic() - started
        assert failures.failed.total() == failures.restarted.total() == killer.done, f"{killer.done} kills: {failures}"
        assert collector.frames == tally.frames, f"{collector.frames} frames counted, {tally.frames} delivered"
        after = open_now()
        # A successor has a pipe where a TCP worker has two connections; Ray's threads come and go.
        less = all(now <= then for now, then in zip(after, before, strict=True))
        assert backend == "ray" or less, f"descriptors, threads, children: {before} before, {after} after"
    return tally


def main(
    backend: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(BACKENDS)}; else shared_mem.")] = None,
    kills: Annotated[int, typer.Option(min=1, help="Kills in each run.")] = 200,
    workers: Annotated[int, typer.Option(min=1, help="Workers.")] = 2,
    pause: Annotated[float, typer.Option(min=0.001, help="Mean seconds between two kills.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Of the kills.")] = 0,
) -> None:
    """Kill workers at random; fail if anything does not add up."""
    logging.getLogger("collectors").setLevel(logging.ERROR)  # a line for each kill is too many
    chosen = backend or ["shared_mem"]
    if unknown := set(chosen) - set(BACKENDS):
        raise typer.BadParameter(f"unknown backend {', '.join(sorted(unknown))}: choose from {', '.join(BACKENDS)}")
    table = Table(title=f"{workers} workers, a kill every {pause:g} s on average")
    columns = ("backend", "collector", "kills", "batches", "frames", "updates", "torn", "went back", "stale")
    for column in (*columns, "longest batch", "s"):
        table.add_column(column, justify="left" if column in columns[:2] else "right", no_wrap=True)
    bad, console = 0, Console(width=140)
    shown = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*shown, console=console, transient=True)
    for name in chosen:
        for sync in (True, False):
            how = "sync" if sync else "async"
            with progress:
                task = progress.add_task(f"kills, {name}, {how}", total=kills)
                tell = partial(progress.update, task)
                tally = check(name, sync, kills=kills, workers=workers, pause=pause, seed=seed, tell=tell)
                progress.remove_task(task)
            counts = (tally.kills, tally.batches, tally.frames, tally.updates, *tally.wrong.values())
            last = (f"{tally.longest * 1e3:.0f} ms", f"{tally.seconds:.0f}")
            table.add_row(name, how, *(f"{count:,}" for count in counts), *last)
            bad += sum(tally.wrong.values())
    console.print(table)
    if bad:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
