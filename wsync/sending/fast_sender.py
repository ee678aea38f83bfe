"""A sender's fast path: armed, taken, and left again by an update that is not usual (``fast_path.py``)."""

from __future__ import annotations

import time
from typing import Any

from wsync.deadlines import deadline_in
from wsync.sending.answers import Answers
from wsync.sending.end import SenderEnd
from wsync.sending.fast_path import FastPath, PartialDelivery
from wsync.sending.membership import Membership
from wsync.sending.source import Source
from wsync.types import SyncReport
from wsync.weights.layout import Layout


class FastSender:
    """The fast path of one sender, while there is one.

    Args:
        end: offers it.
        source: what a send without weights means.
        members: its workers.
        answers: of theirs, where an update has to go on the slow path.
        published: whether a send is finished without answers.
    """

    def __init__(
        self, end: SenderEnd, source: Source, members: Membership, answers: Answers, *, published: bool
    ) -> None:
        self._end = end
        self._source = source
        self._members = members
        self._answers = answers
        self._published = published
        self.path: FastPath | None = None

    def arm(self, weights: object, layout: Layout) -> None:
        """Take the fast path with updates like this one, which went to everybody, from now on."""
        if self._members.absent or self._members.extra:
            return
        locator, end = self._source.locator(weights, layout), self._end.fast_path(acknowledge=not self._published)
        if locator is not None and end is not None:
            self.path = FastPath(locator, self._source.weights, end)

    def disarm(self) -> None:
        """Something has happened that is not usual."""
        self.path = None

    def send(self, path: FastPath, tensors: Any, version: int, began: float) -> SyncReport | None:
        """Deliver what ``FastPath.find`` has found; None, with nothing done, if it is unusual in any respect."""
        report = path.end.update(tensors, version, self._answers.timeout, began)
        if report is None:
            return None
        if not isinstance(report, SyncReport):
            report = self._go_on(path, PartialDelivery(*report), version, began)
        self._members.due.update(report.workers)
        return report

    def _go_on(self, path: FastPath, partial: PartialDelivery, version: int, began: float) -> SyncReport:
        """Take the slow path where the fast one has ended: somebody has died, or failed, or said something else."""
        self.disarm()
        workers, timeout = self._members.present, self._answers.timeout
        left = None if timeout is None else max(0.0, timeout - (time.perf_counter() - began))
        self._members.note(version, ((workers, b""),))
        path.end.complete(partial, version)
        if self._published:
            self._answers.hear_of_failures(workers, version)
        else:
            self._answers.expect(workers, version, deadline_in(left))
        report, seconds = partial.report, time.perf_counter() - began
        acknowledge = report.phases["acknowledge"] + seconds - report.seconds
        return report._replace(seconds=seconds, phases={**report.phases, "acknowledge": acknowledge})
