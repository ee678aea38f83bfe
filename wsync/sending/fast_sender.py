"""Where every update enters, and where usual ones take the fast path (``fast_path.py``)."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from wsync.deadlines import deadline_in
from wsync.sending.answers import Answers
from wsync.sending.end import SenderEnd
from wsync.sending.fast_path import FastPath, PartialDelivery
from wsync.sending.membership import Membership
from wsync.sending.source import Source
from wsync.types import SyncReport
from wsync.weights.layout import Layout


class FastSender(ABC):
    """What a ``Sender`` does with usual updates. All others are the subclass's.

    Args:
        end: the trainer's end of the lines.
        source: where weights come from when a call brings none.
        num_workers: how many workers there are to be.
        timeout: seconds that answers are waited for; None for no limit.
        published: a send is finished when every worker is bound to use it, not when every worker has said so.
        record: told of each finished update.

    Attributes:
        version: the newest.
        source: as given.
    """

    def __init__(
        self,
        end: SenderEnd,
        source: Source,
        num_workers: int,
        timeout: float | None,
        *,
        published: bool,
        record: Callable[[SyncReport], None],
    ) -> None:
        self.version = 0
        self.source = source
        self._end = end
        self._published = published
        self._record = record
        self._members = Membership(num_workers)
        self._answers = Answers(end, self._members, timeout)
        self._lock = threading.RLock()
        self._path: FastPath | None = None
        self._newest: SyncReport | None = None  # of those that went this way, while it is open

    def send(self, weights: object, worker_ids: int | Sequence[int] | None, wait: bool) -> SyncReport | None:
        """Deliver an update; with ``wait``, return when the promise of a finished send holds."""
        with self._lock:  # no call and no object more than it takes: each costs microseconds where caches are cold
            began = time.perf_counter()
            path = self._path
            if path is not None and wait and worker_ids is None:
                given = path.own if weights is None else weights
                tensors = path.tree if given is path.model else path.listed(given)
                if tensors is not None:
                    self.version += 1  # first: an update that is interrupted keeps its number
                    report = path.update(tensors, self.version, self._answers.timeout, began)
                    if report is not None:
                        if not isinstance(report, SyncReport):
                            report = self._go_on(path, PartialDelivery(*report), began)
                        self._newest = report
                        self._record(report)
                        return report
                    self.version -= 1
        return self._send_slowly(weights, worker_ids, wait=wait)

    @abstractmethod
    def _send_slowly(self, weights: object, worker_ids: int | Sequence[int] | None, *, wait: bool) -> SyncReport | None:
        """``send`` an update that is not usual."""

    def _arm(self, weights: object, layout: Layout) -> None:
        """Take the fast path with updates like this one, which went to everybody, from now on."""
        if self._members.absent or self._members.extra:
            return
        locator = self.source.locator(weights, layout)
        end = self._end.fast_path(acknowledge=not self._published)
        if locator is not None and end is not None:
            self._path = FastPath(self.source.weights, *locator, *end)

    def _disarm(self) -> None:
        """Something has happened that is not usual."""
        self._path = None
        if self._newest is not None:
            self._members.due.update(self._newest.workers)
            self._newest = None

    def _go_on(self, path: FastPath, partial: PartialDelivery, began: float) -> SyncReport:
        """Take the slow path where the fast one has ended: somebody has died, or failed, or said something else."""
        self._disarm()
        workers, timeout, version = self._members.present, self._answers.timeout, self.version
        left = None if timeout is None else max(0.0, timeout - (time.perf_counter() - began))
        self._members.note(version, ((workers, b""),))
        path.complete(partial, version)
        if self._published:
            self._answers.hear_of_failures(workers, version)
        else:
            self._answers.expect(workers, version, deadline_in(left))
        report, seconds = partial.report, time.perf_counter() - began
        acknowledge = report.phases["acknowledge"] + seconds - report.seconds
        return report._replace(seconds=seconds, phases={**report.phases, "acknowledge": acknowledge})
