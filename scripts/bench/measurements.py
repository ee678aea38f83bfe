"""What is measured: the values that cross between the processes of a benchmark, and how they are taken."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True)
class Round:
    """One update.

    Attributes:
        seconds: duration of the call.
        copy: seconds of a plain copy of the same bytes, right after the call.
        trainer_cpu: CPU seconds of the trainer's process during the call.
        workers_cpu: CPU seconds of all workers' processes during the call.
        phases: seconds by phase, as the scheme reports them; empty for the peer.
        wrong: description of what a worker saw afterwards, if that was not the update; else empty.
    """

    seconds: float
    copy: float
    trainer_cpu: float
    workers_cpu: float
    phases: Mapping[str, float] = field(default_factory=dict)
    wrong: str = ""


@dataclass(frozen=True)
class Pauses:
    """Pauses of a worker that forwards in a tight loop, caused by updates; all times in seconds.

    Attributes:
        usual: median time between the ends of two forwards, while nothing is sent.
        usual_longest: the longest of those times.
        switches: times between two forwards of which the second was the first with new weights.
        longest: the longest time between two forwards, while updates were sent.
        forwards: number of forwards while updates were sent.
        mixed: forwards with weights of two versions.
        backwards: forwards with an older version than the forward before.
    """

    usual: float
    usual_longest: float
    switches: tuple[float, ...]
    longest: float
    forwards: int
    mixed: int
    backwards: int


@dataclass(frozen=True)
class Acting:
    """Updates sent to workers that forward in a tight loop.

    Attributes:
        seconds: duration of each call.
        pauses: one per worker.
        wrong: description of what a worker saw afterwards, if that was not the last update.
    """

    seconds: tuple[float, ...]
    pauses: tuple[Pauses, ...]
    wrong: str


@dataclass(frozen=True)
class Memory:
    """One process's memory; all in bytes.

    Attributes:
        process: ``"trainer"``, or ``"worker"`` and its number.
        growth: of the peak, above what was resident before the workers connected (in a collector: afterwards).
        resident: at the end, including shared memory.
        shared: the part of it that is shared memory (``RssShmem``).
    """

    process: str
    growth: int
    resident: int
    shared: int


class PlainCopy:
    """Copies ``nbytes`` bytes of float32 by ``Tensor.copy_``."""

    def __init__(self, nbytes: int) -> None:
        self._source, self._target = torch.rand(nbytes // 4), torch.rand(nbytes // 4)

    def seconds(self, value: float) -> float:
        """Return the seconds of one copy of new values."""
        self._source.fill_(value)
        started = time.perf_counter()
        self._target.copy_(self._source)
        return time.perf_counter() - started


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process, including those that have ended.

    Raises:
        OSError: there is no such process.
    """
    return time.clock_gettime(~pid << 3 | 2)  # the clock id of clock_getcpuclockid(3) on Linux


class MemoryMeter:
    """Measures the memory of processes, from its construction on.

    Args:
        processes: ``{name: pid}``.
    """

    def __init__(self, processes: Mapping[str, int]) -> None:
        self._processes = dict(processes)
        self._before: dict[str, int] = {}
        for name, pid in self._processes.items():
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is counted from here: see proc(5)
            self._before[name] = _status(pid)["VmRSS"]

    def read(self) -> list[Memory]:
        """Return the memory of each process since the construction."""
        found = []
        for name, pid in self._processes.items():
            status = _status(pid)
            found.append(Memory(name, status["VmHWM"] - self._before[name], status["VmRSS"], status["RssShmem"]))
        return found


def _status(pid: int) -> dict[str, int]:
    """Return the sizes in ``/proc/<pid>/status``, in bytes."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[-1] == "kB"}
