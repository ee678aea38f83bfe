"""Early joins: replacements that have connected before ``readmit`` is called for them.

They connected while only other workers were awaited, or in a ``readmit`` that timed out or was interrupted.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from wsync.deadlines import NOW, wait_readable

_TICKS = os.sysconf("SC_CLK_TCK")  # per second: the unit of the start times in /proc


@dataclass(frozen=True, slots=True)
class EarlyJoin:
    """A replacement that was connected before ``readmit`` was called for it.

    Attributes:
        unanswered_version: the version that it was sent as it connected, and has not acknowledged; 0 if there is none.
    """

    unanswered_version: int


class EarlyJoins:
    """The early joins, by worker. Used by ``WorkerConnections``, under the channel's lock."""

    def __init__(self) -> None:
        self._joins: dict[int, EarlyJoin] = {}
        # When each worker's last connection was accepted, in seconds of CLOCK_BOOTTIME (the clock of the start times in
        # /proc). Entries are never removed.
        self._connected_at: dict[int, float] = {}

    def has_connected(self, worker: int) -> bool:
        """Return whether a worker with this index was ever accepted."""
        return worker in self._connected_at

    def note_connection(self, worker: int, version: int | None) -> None:
        """Record that a worker connects now.

        ``version``: None if the worker was awaited; in an early join, the version that it is sent (0: none).
        """
        self._connected_at[worker] = time.clock_gettime(time.CLOCK_BOOTTIME)
        if version is not None:
            self.add(worker, EarlyJoin(version))

    def add(self, worker: int, join: EarlyJoin) -> None:
        """Record an early join."""
        self._joins[worker] = join

    def set_answered(self, worker: int) -> None:
        """Record that ``wait_acks`` has returned a worker's answer."""
        if worker in self._joins:
            self._joins[worker] = EarlyJoin(0)

    def discard(self, *workers: int) -> None:
        """Forget workers."""
        for worker in workers:
            self._joins.pop(worker, None)

    def pop(self, worker: int, sentinel: int | None) -> EarlyJoin | None:
        """Return a worker's early join, and forget it. None if there is none, or if another process has made it.

        Args:
            worker: its index.
            sentinel: of the process that must have made it (readable once it has ended); None if any process may.
        """
        join = self._joins.pop(worker, None)
        if join is None or (sentinel is not None and _cannot_be_process(sentinel, self._connected_at[worker])):
            return None
        return join


def _cannot_be_process(sentinel: int, connected_at: float) -> bool:
    """Return whether the connection cannot be by the process of ``sentinel``: it has ended, or was started later.

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
