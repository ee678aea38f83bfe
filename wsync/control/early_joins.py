"""Replacements that are connected before ``readmit`` is called for them, so that it need not wait for them.

They connected while only other workers were awaited, or in a ``readmit`` that timed out or was interrupted.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from wsync.deadlines import NOW, wait_readable

_TICKS = os.sysconf("SC_CLK_TCK")  # per second: the unit of the start times in /proc


class EarlyJoins:
    """The replacements that are connected already, each with the version that it was sent and has not acknowledged.

    That version is 0 if no acknowledgement is outstanding.

    Used by ``WorkerConnections``, under the channel's lock.

    Attributes:
        connected_at: when each worker's last connection was accepted, in seconds of CLOCK_BOOTTIME (the clock of the
            start times in /proc). Entries are never removed: an index without one was never connected.
    """

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}
        self.connected_at: dict[int, float] = {}

    def note_connection(self, worker: int, version: int | None) -> None:
        """Record that a worker connects now. ``version``: see ``add``; None: it was awaited, so it is no early join."""
        self.connected_at[worker] = time.clock_gettime(time.CLOCK_BOOTTIME)
        if version is not None:
            self.add(worker, version)

    def add(self, worker: int, version: int) -> None:
        """Record an early join. ``version``: the version that is not acknowledged yet; 0 if there is none."""
        self._versions[worker] = version

    def set_answered(self, worker: int) -> None:
        """Record that ``wait_acks`` has returned a worker's answer: no acknowledgement is outstanding."""
        if worker in self._versions:
            self._versions[worker] = 0

    def discard(self, worker: int) -> None:
        """Forget a worker."""
        self._versions.pop(worker, None)

    def pop(self, worker: int, sentinel: int | None) -> int | None:
        """Return a worker's version, and forget the worker.

        Args:
            worker: its index.
            sentinel: readable when the replacement's process has ended; None if that process is not known.

        Returns:
            The version; 0 if no acknowledgement is outstanding. None if the worker is not recorded, or is another
            process than that of ``sentinel``, which has ended, or was started after the worker had connected.
        """
        version = self._versions.pop(worker, None)
        if version is None or (sentinel is not None and _is_another_process(sentinel, self.connected_at[worker])):
            return None
        return version


def _is_another_process(sentinel: int, connected_at: float) -> bool:
    """Return whether the process of ``sentinel`` is not the one that connected: it has ended, or was started later.

    False if ``sentinel`` is no pidfd and is not readable: the time of the start is then not known.
    """
    if wait_readable([sentinel], NOW):
        return True
    try:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/self/fdinfo/{sentinel}").read_text().splitlines())
        stat = Path(f"/proc/{int(fields['Pid'])}/stat").read_text(errors="replace")
    except (KeyError, OSError):  # no pidfd; or the process ends now
        return False
    started = int(stat.rsplit(")", 1)[1].split()[19]) / _TICKS  # starttime in proc(5): rounded down, so never too late
    return started > connected_at
