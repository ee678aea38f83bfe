"""Waiting until threads sleep, and processes have ended."""

import os
import select
import subprocess
import threading
import time
from pathlib import Path

from wsync.testing.workers import state_of


def wait_until_asleep(thread: int, patience: float = 30.0) -> None:
    """Return when a thread of this process, by its native id, waits in the kernel.

    CPython may lose the wake-up of a signal that arrives between its last look for signals and the system call.
    """
    deadline = time.monotonic() + patience
    while state_of(Path(f"/proc/self/task/{thread}")) != "S":
        assert time.monotonic() < deadline, f"thread {thread} did not wait"
        os.sched_yield()


def end_of(name: str) -> None:
    """Wait until this process has no thread ``name``."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join()


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
