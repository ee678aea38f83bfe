"""What a process has that a scheme may have made: threads, descriptors, children, shared memory."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any


def mapped() -> int:
    return sum("wsync" in line for line in Path("/proc/self/maps").read_text().splitlines())


def resident() -> float:
    """MiB of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def census() -> dict[str, Any]:
    gc.collect()  # what earlier tests have left to it: a memory map keeps a descriptor
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "children": len(children),
        "segments": sorted(os.listdir("/dev/shm")),
        "mappings": mapped(),
    }


def census_in_worker(host: Any) -> dict[str, Any]:
    return census()


def without_segments(count: dict[str, Any]) -> dict[str, Any]:
    """Without /dev/shm, where other programs of this machine come and go."""
    return {what: count[what] for what in count if what != "segments"}
