"""A side of a case: a trainer with its workers. Here: one that sends by a scheme alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from tensordict import TensorDict
from torch import nn

import wsync
from bench.cases import Acting, Case
from bench.crews import Crew, Lines, process_crew, rpc_crew
from bench.meters import MemoryMeter
from bench.models import Revealing, become

MakeScheme = Callable[[Case], wsync.WeightSyncScheme]
_PACE = 0.002  # seconds between updates to workers that forward in a tight loop


class Side(Protocol):
    """One implementation at work in a case."""

    @property
    def model(self) -> nn.Module:
        """The trainer's, which it changes."""
        ...

    @property
    def pids(self) -> Mapping[str, int]:
        """The workers' processes, by name."""
        ...

    @property
    def memory(self) -> MemoryMeter:
        """Of all processes, from when the side was made."""
        ...

    def send(self) -> None:
        """Update the workers with ``model``: this is what is timed."""
        ...

    def phases(self) -> Mapping[str, float]:
        """Of the last update, in seconds, if it knows them."""
        ...

    def wrong(self, value: float) -> str:
        """Have every worker forward, and compare: what was seen, if that was not ``value``; else empty."""
        ...

    def act(self, first: int, sends: int) -> Acting | None:
        """Send values from ``first`` on while workers forward in a tight loop; None where that cannot be."""
        ...


class Standalone:
    """Workers of our own, which we can tell what to do.

    Args:
        model: the trainer's.
        lines: to the workers.
        pids: theirs.
        memory: meter.
        deliver: sends ``model``.
        phases: of the last update.
    """

    def __init__(
        self,
        model: Revealing,
        lines: Lines,
        pids: Mapping[str, int],
        memory: MemoryMeter,
        deliver: Callable[[], None],
        phases: Callable[[], Mapping[str, float]],
    ) -> None:
        self.model, self.pids, self.memory = model, pids, memory
        self._lines = lines
        self.send, self.phases = deliver, phases

    def wrong(self, value: float) -> str:
        """See Side."""
        self._lines.say("look")
        return tell_wrong(value, dict(enumerate(self._lines.hear())))

    def act(self, first: int, sends: int) -> Acting:
        """See Side."""
        self._lines.say("act")
        self._lines.hear()
        seconds = []
        for value in range(first, first + sends):
            become(self.model, value)
            started = time.perf_counter()
            self.send()
            seconds.append(time.perf_counter() - started)
            time.sleep(_PACE)  # a pace, nothing is waited for
        self._lines.say("enough")
        pauses = tuple(self._lines.hear())
        return Acting(tuple(seconds), pauses, self.wrong(first + sends - 1))


def tell_wrong(value: float, seen: Mapping[int, tuple[float, float]]) -> str:
    """What workers saw whose smallest and largest weight are not ``value``."""
    bad = [f"worker {worker} saw {low:g} to {high:g}" for worker, (low, high) in seen.items() if {low, high} != {value}]
    return f"{', '.join(bad)} after an update to {value:g}" if bad else ""


def given(case: Case, model: nn.Module) -> Any:
    """What a call is given to send ``model``."""
    if case.give == "module":
        return model
    weights: Any = TensorDict.from_module(model)
    return weights.data


def phases_of(scheme: wsync.WeightSyncScheme) -> Mapping[str, float]:
    """What its last update cost."""
    report = scheme.metrics.last
    return {} if report is None else report.phases


def named(pids: Any) -> dict[str, int]:
    """Workers' processes with their names."""
    return {f"worker {worker}": pid for worker, pid in enumerate(pids)}


@contextmanager
def send_side(case: Case, make_scheme: MakeScheme, trainer: int) -> Iterator[Standalone]:
    """Send by a scheme alone."""
    with _crew(case) as crew:
        model, scheme = Revealing(case.mib, case.tensors, 0.0), make_scheme(case)
        pids = named(crew.pids)
        memory = MemoryMeter({"trainer": trainer, **pids})
        with scheme:
            lines = crew.connect(scheme, model)

            def deliver() -> None:
                scheme.send(given(case, model))

            yield Standalone(model, lines, pids, memory, deliver, lambda: phases_of(scheme))
            lines.say("leave")
            lines.hear()


def _crew(case: Case) -> AbstractContextManager[Crew]:
    if case.backend == "rpc":
        return rpc_crew(case)
    if case.backend == "ray":
        from bench.ray_crew import ray_crew

        return ray_crew(case)
    return process_crew(case)
