"""A side of a case: a trainer with its workers, of a standalone scheme or in a collector."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from harness.backends import collector_class
from harness.models import RevealingModel, cartpole_policy, fill
from harness.processes import WorkerPipes
from tensordict import TensorDict
from torch import nn

import wsync
from bench.config import Case
from bench.measurements import Acting, MemoryMeter
from bench.workers import named, share_gpu, workers_of
from collectors import GymEnv

NAME = "wsync"
MakeScheme = Callable[[Case], wsync.WeightSyncScheme]
_SEND_INTERVAL = 0.002  # seconds between updates to workers that forward in a tight loop


class Standalone:
    """Plain workers, which take commands.

    Args:
        model: the trainer's, which the benchmark changes.
        pipes: the pipes to the workers.
        pids: the workers' processes, by name.
        memory: the memory of all processes, since the side was made.
        send: updates the workers with ``model``; the timed call.
        phases: returns the seconds of each phase of the last update, if the implementation measures them.
    """

    def __init__(
        self,
        model: nn.Module,
        pipes: WorkerPipes,
        pids: Mapping[str, int],
        memory: MemoryMeter,
        send: Callable[[], None],
        phases: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self.model, self.pids, self.memory = model, pids, memory
        self._pipes = pipes
        self.send, self.phases = send, phases

    def wrong(self, value: float) -> str:
        """Let every worker forward; describe what was seen if it was not ``value``, else return an empty string."""
        self._pipes.send("look")
        return difference(value, dict(enumerate(self._pipes.receive())))

    def act(self, first: int, sends: int) -> Acting:
        """Send values from ``first`` on while workers forward in a tight loop."""
        self._pipes.send("act")
        self._pipes.receive()
        seconds = []
        for value in range(first, first + sends):
            fill(self.model, value)
            started = time.perf_counter()
            self.send()
            seconds.append(time.perf_counter() - started)
            time.sleep(_SEND_INTERVAL)  # sets the rate of updates; it waits for no event
        self._pipes.send("stop")
        pauses = tuple(self._pipes.receive())
        return Acting(tuple(seconds), pauses, self.wrong(first + sends - 1))

    def leave(self) -> None:
        """Let the workers disconnect."""
        self._pipes.send("leave")
        self._pipes.receive()


class Collecting:
    """Workers of a collector, which act in CartPole between updates.

    Args:
        case: what is measured.
        model: the trainer's, not the object that the collector was given.
        next_batch: returns the next batch, of all workers.
        send: sends ``model``.
        trainer: process id.
        phases: the phases of the last update.
    """

    def __init__(
        self,
        case: Case,
        model: nn.Module,
        next_batch: Callable[[], Any],
        send: Callable[[], None],
        trainer: int,
        phases: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self.model, self.send, self.phases = model, send, phases
        self._next = next_batch
        self.pids: Mapping[str, int] = named(sorted(set(self._next()["process"].flatten().tolist())))
        self.memory = MemoryMeter({"trainer": trainer, **self.pids})

    def wrong(self, value: float) -> str:
        """See Standalone; checks every frame of the next batch."""
        batch = self._next()
        reveal, process = batch["reveal"].reshape(-1, 2), batch["process"].flatten()
        seen = {}
        for worker, pid in enumerate(self.pids.values()):
            frames = reveal[process == pid]
            if not len(frames):
                return f"worker {worker} has no frame in the batch"
            seen[worker] = (frames[:, 0].min().item(), frames[:, 1].max().item())
        return difference(value, seen)

    def act(self, first: int, sends: int) -> None:
        """Return None: between batches workers do not act."""


Side = Standalone | Collecting
"""One implementation in a case."""


def difference(value: float, seen: Mapping[int, tuple[float, float]]) -> str:
    """Describe the workers in which the smallest or largest weight is not ``value``."""
    bad = [f"worker {worker} saw {low:g} to {high:g}" for worker, (low, high) in seen.items() if {low, high} != {value}]
    return f"{', '.join(bad)} after an update to {value:g}" if bad else ""


def argument(case: Case, model: nn.Module) -> Any:
    """Return the argument of a call that sends ``model``."""
    if case.give == "module":
        return model
    weights: Any = TensorDict.from_module(model)
    return weights.data


def make_scheme(case: Case) -> wsync.WeightSyncScheme:
    """Return our scheme of a case."""
    return wsync.WeightSyncScheme.from_backend(case.backend, **case.scheme_options)


def make_side(case: Case, trainer: int, make_scheme: MakeScheme = make_scheme) -> AbstractContextManager[Side]:
    """Make our side of a case, for a trainer with this process id; a ``MakeSide``."""
    side = _standalone if case.kind == "send" else _collecting
    return side(case, make_scheme(case), trainer)


def _phases(scheme: wsync.WeightSyncScheme) -> Mapping[str, float]:
    report = scheme.metrics.last
    return {} if report is None else report.phases


@contextmanager
def _standalone(case: Case, scheme: wsync.WeightSyncScheme, trainer: int) -> Iterator[Standalone]:
    share_gpu(case)
    with workers_of(case) as workers:
        model = RevealingModel(case.mib, case.tensors, 0.0).to(case.device)
        memory = MemoryMeter({"trainer": trainer, **workers.pids})
        with scheme:
            pipes = workers.connect(scheme, model)

            def send() -> None:
                scheme.send(argument(case, model))

            side = Standalone(model, pipes, workers.pids, memory, send, lambda: _phases(scheme))
            yield side
            side.leave()


@contextmanager
def _collecting(case: Case, scheme: wsync.WeightSyncScheme, trainer: int) -> Iterator[Collecting]:
    policy = cartpole_policy(case.mib, case.tensors)
    with collector_class(case.backend)(
        [functools.partial(GymEnv, "CartPole-v1")] * case.workers,
        policy,
        frames_per_batch=case.frames * case.workers,
        weight_sync_schemes={"policy": scheme},
    ) as collector:
        model = copy.deepcopy(policy)
        fill(model, 0.0)

        def send() -> None:
            collector.update_policy_weights_(argument(case, model))

        send()
        yield Collecting(case, model, lambda: next(collector), send, trainer, lambda: _phases(scheme))
