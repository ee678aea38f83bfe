"""Waiting until threads sleep, and processes have ended."""

import os
import select
import subprocess
import time
from contextlib import suppress
from pathlib import Path


def has_ended(process: int, within: float) -> bool:
    """Whether a process, by its descriptor, ends in so many seconds."""
    poller = select.poll()
    poller.register(process, select.POLLIN)
    return bool(poller.poll(within * 1e3))


def ends(pid: int, within: float = 15.0) -> bool:
    """Whether the process ends in so many seconds, or has ended before."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return has_ended(descriptor, within)
    finally:
        os.close(descriptor)


def descendants(pid: int, depth: int = 1) -> dict[int, int]:
    """All processes that descend from ``pid``, and how far."""
    found: dict[int, int] = {}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in map(int, task.read_text().split()):
                found |= {child: depth} | descendants(child, depth + 1)
    return found


def left_of(group: int, within: float = 10.0, kind: str = "pgid") -> list[str]:
    """Processes of the process group, or of the session (``kind="sid"``), that are there after so many seconds."""
    deadline = time.monotonic() + within
    while True:
        listed = subprocess.run(
            ["ps", "-eo", f"{kind}=,stat=,args="], capture_output=True, text=True, check=True
        ).stdout
        left = [line for line in listed.splitlines() if line.split()[0] == str(group) and "Z" not in line.split()[1]]
        if not left or time.monotonic() > deadline:
            return left
