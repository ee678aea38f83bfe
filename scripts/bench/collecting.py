"""A side of a case whose workers act in CartPole, between updates by a collector."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from bench.cases import Case
from bench.meters import MemoryMeter
from bench.models import become, revealing_policy
from bench.sides import MakeScheme, given, named, phases_of, tell_wrong
from collectors import BaseCollector, GymEnv, MultiSyncCollector


class Collecting:
    """Workers of a collector, which act in CartPole between updates.

    Args:
        case: what is measured.
        model: the trainer's, apart from what the collector was given.
        next_batch: the next one, by all workers.
        deliver: sends ``model``.
        phases: of the last update.
        trainer: process.
    """

    def __init__(
        self,
        case: Case,
        model: nn.Module,
        next_batch: Callable[[], Any],
        deliver: Callable[[], None],
        phases: Callable[[], Mapping[str, float]],
        trainer: int,
    ) -> None:
        self.model, self.send, self.phases = model, deliver, phases
        self._next, self._workers = next_batch, case.workers
        processes = sorted(set(self._next()["process"].flatten().tolist()))
        self.pids: Mapping[str, int] = named(processes)
        self.memory = MemoryMeter({"trainer": trainer, **self.pids})

    def wrong(self, value: float) -> str:
        """See Side: of the next batch, every frame of every worker."""
        batch = self._next()
        reveal, process = batch["reveal"].reshape(-1, 2), batch["process"].flatten()
        seen = {}
        for worker, pid in enumerate(self.pids.values()):
            frames = reveal[process == pid]
            if not len(frames):
                return f"worker {worker} has no frame in the batch"
            seen[worker] = (frames[:, 0].min().item(), frames[:, 1].max().item())
        return tell_wrong(value, seen)

    def act(self, first: int, sends: int) -> None:
        """See Side: between batches workers do not act."""


@contextmanager
def update_side(case: Case, make_scheme: MakeScheme, trainer: int) -> Iterator[Collecting]:
    """Update the workers of a collector, between its batches."""
    scheme, policy = make_scheme(case), revealing_policy(case.mib, case.tensors)
    collector = _collector(case.backend)(
        [functools.partial(GymEnv, "CartPole-v1")] * case.workers,
        policy,
        frames_per_batch=case.frames * case.workers,
        weight_sync_schemes={"policy": scheme},
    )
    with collector:
        model = copy.deepcopy(policy)
        become(model, 0.0)

        def deliver() -> None:
            collector.update_policy_weights_(given(case, model))

        deliver()
        yield Collecting(case, model, lambda: next(collector), deliver, lambda: phases_of(scheme), trainer)


def _collector(backend: str) -> Callable[..., BaseCollector]:
    from collectors import distributed

    found: dict[str, Callable[[], Callable[..., BaseCollector]]] = {
        "distributed": lambda: distributed.DistributedCollector,
        "rpc": lambda: distributed.RPCCollector,
        "ray": lambda: distributed.RayCollector,
    }
    return found[backend]() if backend in found else MultiSyncCollector
