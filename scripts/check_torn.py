"""Look for torn policies: workers forward without a pause while the trainer sends as fast as it can.

Every weight of version v is filled with the number v, and a forward reports the smallest and the largest number that
it met in each layer. So each forward tells whether it saw one version (*mixed* if not), whether versions went back,
and whether it used a version older than one whose ``send`` had returned before the forward began (*stale*).

    python scripts/check_torn.py --forwards 1000000                       # every backend, standalone
    python scripts/check_torn.py --forwards 1000000 --collector           # inside a collector
    python scripts/check_torn.py --bypass-gate --mib 8                    # the control, which does see mixed ones
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
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
from torch import Tensor, nn

import collectors.distributed
import wsync
from collectors import MultiAsyncCollector

BACKENDS: dict[str, Callable[[], wsync.WeightSyncScheme]] = {
    "shared_mem": partial(wsync.SharedMemWeightSyncScheme),
    "shared_mem-published": partial(wsync.SharedMemWeightSyncScheme, acknowledge="published"),
    "multiprocess": partial(wsync.MultiProcessWeightSyncScheme),
    "distributed": partial(wsync.DistributedWeightSyncScheme),
    "distributed-gloo": partial(wsync.DistributedWeightSyncScheme, shared_memory=False),
    "rpc": partial(wsync.RPCWeightSyncScheme),
    "ray": lambda: wsync.RayWeightSyncScheme(),  # Ray is imported when it is asked for
}
REMOTE = {"distributed": "DistributedCollector", "rpc": "RPCCollector", "ray": "RayCollector"}
STANDALONE = [name for name in BACKENDS if name not in ("rpc", "ray")]  # whose workers are plain processes
LAYERS = 8
_PATIENCE = 30.0  # seconds in which a worker has to end


class Revealing(nn.Module):
    """A model whose output says which versions its weights are of.

    Args:
        mib: MiB of all weights together, in ``LAYERS`` layers.
    """

    def __init__(self, mib: float) -> None:
        super().__init__()
        numel = max(16, int(mib * 2**20 / 4 / LAYERS))
        self.layers = nn.ParameterList(nn.Parameter(torch.ones(numel)) for _ in range(LAYERS))
        self.register_buffer("mark", torch.ones(1))

    def forward(self) -> Tensor:
        """``float32[2 * LAYERS + 1]``: the extremes of each layer, and the buffer. All alike, or it was torn."""
        extremes = [extreme for layer in self.layers for extreme in layer.detach().aminmax()]
        return torch.stack([*extremes, self.mark[0]])  # pyright: ignore[reportIndexIssue]

    @torch.no_grad()
    def become(self, version: int) -> None:
        """Fill every weight with ``version``."""
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.fill_(version)


class RevealingPolicy(Revealing):
    """The same, acting in ``FloorEnv``."""

    def forward(self, observation: TensorDictBase) -> TensorDictBase:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Write "action", "reveal" and "process"."""
        observation.set("reveal", super().forward())
        observation.set("process", torch.tensor(os.getpid()))
        return observation.set("action", torch.tensor(0))


class FloorEnv(gymnasium.Env):
    """Its observation is the newest version whose ``send`` has returned, as the trainer notes it in a file."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, floor: Path) -> None:
        self._floor = np.memmap(floor, np.int64, "r")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin."""
        super().reset(seed=seed)
        return np.array(self._floor, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Look at the note, before the next forward begins."""
        return np.array(self._floor, np.float32), 0.0, False, False, {}


@dataclass
class Tally:
    """What was seen.

    Attributes:
        forwards: how many.
        versions: how many different versions, summed over workers.
        mixed: forwards that saw more than one version.
        backwards: forwards of an older version than the one before, in the same worker.
        stale: forwards of an older version than one whose ``send`` had returned before.
        updates: sends that returned.
        seconds: how long it took.
        example: the first bad forward, in words.
    """

    forwards: int = 0
    versions: int = 0
    mixed: int = 0
    backwards: int = 0
    stale: int = 0
    updates: int = 0
    seconds: float = 0.0
    example: str = ""
    _latest: dict[int, float] = field(default_factory=dict)

    def see(self, low: float, high: float, floor: float, worker: int) -> None:
        """Take in one forward of ``worker``."""
        latest = self._latest.get(worker, 0.0)
        self.forwards += 1
        self.versions += high > latest
        faults = (low != high, low < latest, low < floor)
        self.mixed += faults[0]
        self.backwards += faults[1]
        self.stale += faults[2]
        if any(faults) and not self.example:
            self.example = (
                f"worker {worker} saw versions {low:.0f} to {high:.0f}, after {latest:.0f}, floor {floor:.0f}"
            )
        self._latest[worker] = high

    def add(self, other: Tally) -> None:
        """Join what another worker saw."""
        for name in ("forwards", "versions", "mixed", "backwards", "stale"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.example = self.example or other.example

    @property
    def faults(self) -> int:
        """Forwards that broke a promise."""
        return self.mixed + self.backwards + self.stale


def _forward_on(
    line: Connection, scheme: wsync.WeightSyncScheme, worker: int, mib: float, floor: Path, most: int, until: float
) -> None:
    """A worker: forward ``most`` times, or for ``until`` seconds, or until told to stop."""
    torch.set_num_threads(1)
    model = Revealing(mib)
    note = np.memmap(floor, np.int64, "r")
    bypass = most < 0
    tally = Tally()
    with scheme:
        scheme.init_on_receiver("policy", model=model, worker_idx=worker)
        scheme.connect()
        forward = model.forward if bypass else model
        deadline = time.monotonic() + until
        while tally.forwards < abs(most) and time.monotonic() < deadline and not (bypass and tally.mixed >= 10):
            known = int(note[0])  # before the forward begins
            seen = forward()
            tally.see(float(seen.min()), float(seen.max()), known, worker)
        line.send(tally)
        line.recv()  # stay, and answer sends, until the trainer has stopped sending


def standalone(
    make: Callable[[], wsync.WeightSyncScheme],
    *,
    forwards: int,
    workers: int,
    mib: float,
    seconds: float,
    bypass: bool = False,
) -> Tally:
    """Workers of our own, who do nothing but forward."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["collectors.workers.worker"])  # the same as the collectors': there is one server
    model = Revealing(mib)
    most = -(-forwards // workers) * (-1 if bypass else 1)
    with _floor() as (path, note), make() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=workers)
        lines: list[Connection] = []
        processes = []
        for worker in range(workers):
            mine, theirs = context.Pipe()
            arguments = (theirs, scheme, worker, mib, path, most, seconds)
            process = context.Process(target=_forward_on, args=arguments, daemon=True)
            process.start()
            theirs.close()
            lines.append(mine)
            processes.append(process)
        total = Tally()
        try:
            scheme.connect()
            started, waiting = time.monotonic(), set(lines)
            while waiting:
                total.updates += _send(model, scheme, note)
                for line in wait(list(waiting), timeout=0):
                    assert isinstance(line, Connection)
                    total.add(line.recv())
                    waiting.discard(line)
            total.seconds = time.monotonic() - started
            for line in lines:
                line.send(None)
        finally:
            for line in lines:
                line.close()
            for process in processes:
                process.join(_PATIENCE)
                process.kill()
                process.join()
                process.close()
    return total


def in_collector(
    backend: str,
    *,
    forwards: int,
    workers: int,
    mib: float,
    seconds: float,
    tell: Callable[..., object] = dict,
) -> Tally:
    """Workers of an asynchronous collector, who act in an environment; ``tell(completed=…)`` hears how far it is."""
    scheme, policy, total = BACKENDS[backend](), RevealingPolicy(mib), Tally()
    policy.become(int(scheme.delivers_at_connect))  # what workers begin with is version 1, or none yet
    learner = RevealingPolicy(mib)  # what the trainer changes; the collector's own stays as it is
    stop, errors = threading.Event(), []
    with (
        _floor() as (path, note),
        _asynchronous(backend)(
            [partial(FloorEnv, path)] * workers,
            policy,
            frames_per_batch=200,
            weight_sync_schemes={"policy": scheme},
        ) as collector,
    ):

        def keep_sending() -> None:
            try:
                while not stop.is_set():
                    total.updates += _send(learner, scheme, note, learner)
            except wsync.WeightSyncError as error:
                errors.append(error)

        sender = threading.Thread(target=keep_sending)
        started = time.monotonic()
        sender.start()
        try:
            while total.forwards < forwards and time.monotonic() - started < seconds and not errors:
                _see_batch(total, next(collector))
                tell(completed=total.forwards)
        finally:
            stop.set()
            sender.join()
        total.seconds = time.monotonic() - started
    if errors:
        raise errors[0]
    return total


def _asynchronous(backend: str) -> Callable[..., Any]:
    """The asynchronous collector that goes with ``backend``."""
    name = REMOTE.get(backend)
    return partial(getattr(collectors.distributed, name), sync=False) if name else MultiAsyncCollector


def _see_batch(total: Tally, batch: TensorDictBase) -> None:
    """Judge every frame of one worker's batch, in order of time; its version must be the one that acted, too."""
    reveal = torch.cat([batch["reveal"], batch["policy_version"].unsqueeze(-1).float()], -1)
    low, high = reveal.amin(-1).tolist(), reveal.amax(-1).tolist()
    floors, processes = batch["observation"][..., 0].tolist(), batch["process"].tolist()
    for frame in zip(low, high, floors, processes, strict=True):
        total.see(*frame)


def _send(model: Revealing, scheme: wsync.WeightSyncScheme, note: np.ndarray, weights: Any = None) -> int:
    version = scheme.version + 1
    model.become(version)
    scheme.send(weights)
    note[0] = version
    return 1


@contextmanager
def _floor() -> Iterator[tuple[Path, np.ndarray]]:
    """A number in a file, that all processes map."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "floor"
        path.write_bytes(bytes(8))
        yield path, np.memmap(path, np.int64, "r+")


def main(
    backend: Annotated[list[str] | None, typer.Option(help="Which backends; all by default.")] = None,
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
    if unknown := set(chosen) - set(known):
        raise typer.BadParameter(f"unknown backend {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    share = -(-forwards // len(chosen))
    table = Table(title=f"{'collector' if collector else 'standalone'}, {workers} workers, {mib:g} MiB")
    for column in ("backend", "forwards", "sends", "versions seen", "mixed", "went back", "stale", "s"):
        table.add_column(column, justify="left" if column == "backend" else "right", no_wrap=True)
    bad: list[str] = []
    console = Console(width=110)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True)
    for name in chosen:
        options = {"forwards": share, "workers": workers, "mib": mib, "seconds": seconds}
        with progress:
            task = progress.add_task(name, total=share if collector else None)  # only a collector tells meanwhile
            if collector:
                tally = in_collector(name, **options, tell=partial(progress.update, task))
            else:
                tally = standalone(BACKENDS[name], **options, bypass=bypass_gate)
            progress.remove_task(task)
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
