"""Cleans up behind a Ray cluster: a process of its own, which outlives the one that has started the cluster.

    python ray_janitor.py <folder>      # hang up on its input, and it begins

If that process is gone too (killed), most of Ray's processes end by themselves, but its agents look after their parent
only now and then. Whoever has a file open in the cluster's folder then is one of them.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

_PATIENCE = 2.0  # seconds in which a process has to end


def users_of(folder: str) -> set[int]:
    """The processes that have a file in ``folder`` open, as far as one may look."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            opened = [os.readlink(link) for link in (process / "fd").iterdir()]
        except OSError:
            continue  # it has ended, or is somebody else's
        if any(name.startswith(folder + os.sep) for name in opened):
            found.add(int(process.name))
    return found


def end(processes: set[int], number: signal.Signals) -> None:
    """Signal them, and wait for their ends."""
    waiting = select.poll()
    left = 0
    for process in processes:
        try:
            descriptor = os.pidfd_open(process)
        except ProcessLookupError:
            continue
        signal.pidfd_send_signal(descriptor, number)
        waiting.register(descriptor, select.POLLIN)
        left += 1
    deadline = time.monotonic() + _PATIENCE
    while left and (ended := waiting.poll(max(0.0, deadline - time.monotonic()) * 1000)):
        for descriptor, _ in ended:
            waiting.unregister(descriptor)
            os.close(descriptor)
            left -= 1


def main(folder: str) -> None:
    """Wait until somebody hangs up; then remove ``folder``, and end who uses it if nobody else will."""
    owner = os.getppid()
    sys.stdin.read()
    for number in (signal.SIGTERM, signal.SIGKILL):
        if os.getppid() != owner:
            end(users_of(folder), number)
        shutil.rmtree(folder, ignore_errors=True)  # Ray's last words may be written meanwhile
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
