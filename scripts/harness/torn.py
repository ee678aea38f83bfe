"""Workers that forward without a pause while versions are sent: what ``scripts/check_torn.py`` counts."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn

import wsync
from harness.backends import collector_class
from harness.models import ConstantEnv, RevealingModel, fill, revealing_policy
from harness.processes import worker_processes

MakeScheme = Callable[[], wsync.WeightSyncScheme]
_ENOUGH = 10  # mixed forwards after which the control ends


@dataclass
class Tally:
    """Counts of what workers have seen: forwards, and different versions, summed over workers.

    Attributes:
        mixed: forwards with weights of several versions.
        backwards: forwards with an older version than the forward before, in the same worker.
        stale: forwards with an older version than one for which ``send`` had returned before.
        updates: number of sends.
        example: description of the first forward that broke a promise.
        latest: by worker, the newest version that it has seen.
    """

    forwards: int = 0
    versions: int = 0
    mixed: int = 0
    backwards: int = 0
    stale: int = 0
    updates: int = 0
    seconds: float = 0.0
    example: str = ""
    latest: dict[int, float] = field(default_factory=dict)

    def count(self, low: float, high: float, floor: float, worker: int) -> None:
        """Count one forward of ``worker`` that began when ``floor`` was the newest version that had been sent."""
        latest = self.latest.get(worker, 0.0)
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

    @property
    def faults(self) -> int:
        """Number of broken promises."""
        return self.mixed + self.backwards + self.stale


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


# --- workers that do nothing but forward ---


def _forward(channel: Connection, worker: int, options: dict[str, Any]) -> None:
    """Forward until there were enough forwards, or the time is over; then report, and stay for the last sends."""
    model, tally = RevealingModel(options["mib"], buffer=True), Tally()
    floor = np.memmap(options["floor"], np.int64, "r")
    with options["scheme"] as scheme:
        scheme.init_on_receiver("policy", model=model, worker_idx=worker)
        scheme.connect()
        forward = model.forward if options["bypass"] else model
        deadline = time.monotonic() + options["seconds"]
        while tally.forwards < options["forwards"] and time.monotonic() < deadline:
            known = int(floor[0])  # before the forward begins
            low, high = forward().tolist()
            tally.count(low, high, known, worker)
            if options["bypass"] and tally.mixed >= _ENOUGH:
                break
        channel.send(tally)
        channel.recv()


def standalone(
    make: MakeScheme, *, forwards: int, workers: int, mib: float, seconds: float, bypass: bool = False
) -> Tally:
    """Check a scheme with plain worker processes; ``bypass`` calls ``model.forward``, around the gate."""
    model, total = RevealingModel(mib, buffer=True), Tally()
    with version_floor() as (path, floor), make() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=workers)
        options = {
            "scheme": scheme, "mib": mib, "floor": path, "forwards": -(-forwards // workers), "seconds": seconds,
            "bypass": bypass,
        }  # fmt: skip
        with worker_processes(_forward, workers, options) as channels:
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


# --- workers of a collector ---


class FloorEnv(ConstantEnv):
    """Its observation is the floor: the newest version for which ``send`` has returned before the next forward."""

    def __init__(self, floor: Path) -> None:
        super().__init__(np.memmap(floor, np.int64, "r"))


def in_collector(
    make: MakeScheme, *, forwards: int, workers: int, mib: float, seconds: float, tell: Callable[..., object] = dict
) -> Tally:
    """Check a scheme in an asynchronous collector; ``tell(completed=…)`` is called with the progress."""
    scheme, policy, total = make(), revealing_policy(mib, buffer=True), Tally()
    fill(policy, int(scheme.delivers_at_connect))  # the workers begin with version 1, or with none
    learner = revealing_policy(mib, buffer=True)  # the collector's own policy stays as it is
    stop, errors = threading.Event(), []
    with (
        version_floor() as (path, floor),
        collector_class(scheme.name, sync=False)(
            [partial(FloorEnv, path)] * workers, policy, frames_per_batch=200, weight_sync_schemes={"policy": scheme}
        ) as collector,
    ):

        def keep_sending() -> None:
            try:
                while not stop.is_set():
                    send_next(learner, scheme, floor, learner)
                    total.updates += 1
            except wsync.WeightSyncError as error:
                errors.append(error)

        sender = threading.Thread(target=keep_sending)
        started = time.monotonic()
        sender.start()
        try:
            while total.forwards < forwards and time.monotonic() - started < seconds and not errors:
                batch = next(collector)
                total.count_batch(batch, batch["observation"].flatten().tolist(), batch["process"].flatten().tolist())
                tell(completed=total.forwards)
        finally:
            stop.set()
            sender.join()
        total.seconds = time.monotonic() - started
    if errors:
        raise errors[0]
    return total
