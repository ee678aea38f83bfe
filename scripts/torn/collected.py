"""Workers of an asynchronous collector, who act in an environment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase

import collectors.distributed
import wsync
from collectors import MultiAsyncCollector
from torn.revealing import FloorEnv, RevealingPolicy, floor, send
from torn.tally import Tally

REMOTE = {"distributed": "DistributedCollector", "rpc": "RPCCollector", "ray": "RayCollector"}


def in_collector(
    make: Callable[[], wsync.WeightSyncScheme],
    *,
    forwards: int,
    workers: int,
    mib: float,
    seconds: float,
    tell: Callable[..., object] = dict,
) -> Tally:
    """Workers of an asynchronous collector, who act in an environment; ``tell(completed=…)`` hears how far it is."""
    scheme, policy, total = make(), RevealingPolicy(mib), Tally()
    policy.become(int(scheme.delivers_at_connect))  # what workers begin with is version 1, or none yet
    learner = RevealingPolicy(mib)  # what the trainer changes; the collector's own stays as it is
    stop, errors = threading.Event(), []
    with (
        floor() as (path, note),
        _asynchronous(scheme.name)(
            [partial(FloorEnv, path)] * workers,
            policy,
            frames_per_batch=200,
            weight_sync_schemes={"policy": scheme},
        ) as collector,
    ):

        def keep_sending() -> None:
            try:
                while not stop.is_set():
                    total.updates += send(learner, scheme, note, learner)
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


def _asynchronous(scheme: str) -> Callable[..., Any]:
    """The asynchronous collector that goes with a scheme."""
    name = REMOTE.get(scheme)
    return partial(getattr(collectors.distributed, name), sync=False) if name else MultiAsyncCollector


def _see_batch(total: Tally, batch: TensorDictBase) -> None:
    """Judge every frame of one worker's batch, in order of time; its version must be the one that acted, too."""
    reveal = torch.cat([batch["reveal"], batch["policy_version"].unsqueeze(-1).float()], -1)
    low, high = reveal.amin(-1).tolist(), reveal.amax(-1).tolist()
    floors, processes = batch["observation"][..., 0].tolist(), batch["process"].tolist()
    for frame in zip(low, high, floors, processes, strict=True):
        total.see(*frame)
