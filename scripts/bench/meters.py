"""What the kernel knows of a process: its CPU time and its memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from bench.cases import Memory


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process, to the nanosecond, those included that have ended.

    Raises:
        OSError: there is no such process.
    """
    return time.clock_gettime(~pid << 3 | 2)  # the clock's number as clock_getcpuclockid(3) makes it on Linux


class MemoryMeter:
    """Watches the memory of some processes, from now on.

    Args:
        processes: ``{who: pid}``.
    """

    def __init__(self, processes: Mapping[str, int]) -> None:
        self._processes = dict(processes)
        self._before: dict[str, int] = {}
        for who, pid in self._processes.items():
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is counted from here: see proc(5)
            self._before[who] = _status(pid)["VmRSS"]

    def read(self) -> list[Memory]:
        """What they have taken since."""
        found = []
        for who, pid in self._processes.items():
            status = _status(pid)
            found.append(Memory(who, status["VmHWM"] - self._before[who], status["VmRSS"], status["RssShmem"]))
        return found


def _status(pid: int) -> dict[str, int]:
    """The fields of ``/proc/<pid>/status`` that are sizes, in bytes."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[-1] == "kB"}
