"""Removes what a local Ray cluster leaves behind: a program that outlives the process that has started the cluster.

    python cluster_cleanup.py <folder>      # starts to clean up at a line on its standard input, or its end

If that process was killed, most of Ray's processes end by themselves, but its agents check their parent only now and
then. They are found by their command line, or by the files that they have open in the cluster's folder: one that
starts has none yet, and a worker replaces its command line later.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

_GRACE = 2.0  # seconds in which a process has to end


def users_of(folder: str) -> set[int]:
    """Return the other processes that name ``folder`` in their command line, or have a file in it open."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            named = os.fsencode(folder) in (process / "cmdline").read_bytes()
            opened = [] if named else [os.readlink(link) for link in (process / "fd").iterdir()]
        except OSError:
            continue  # the process has ended, or belongs to another user
        if named or any(name.startswith(folder + os.sep) for name in opened):
            found.add(int(process.name))
    return found - {os.getpid()}


def end(processes: set[int], number: signal.Signals) -> None:
    """Send a signal to ``processes``, and wait for their ends."""
    waiting = select.poll()
    left = 0
    for process in processes:
        try:
            descriptor = os.pidfd_open(process)
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            continue  # it has ended meanwhile
        waiting.register(descriptor, select.POLLIN)
        left += 1
    deadline = time.monotonic() + _GRACE
    while left and (ended := waiting.poll(max(0.0, deadline - time.monotonic()) * 1000)):
        for descriptor, _ in ended:
            waiting.unregister(descriptor)
            os.close(descriptor)
            left -= 1


def main(folder: str) -> None:
    """Wait for a line on standard input, or its end; remove ``folder``, and end its users if their owner was killed."""
    owner = os.getppid()
    sys.stdin.readline()
    for number in (signal.SIGTERM, signal.SIGKILL):
        if os.getppid() != owner:
            end(users_of(folder), number)
        shutil.rmtree(folder, ignore_errors=True)  # Ray's processes may still write to it
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
