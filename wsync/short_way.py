"""A sender's usual updates: found, taken, and left again where one of them is not usual (``shortcut.py``)."""

from __future__ import annotations

import time
from typing import Any

from wsync.answers import Answers
from wsync.deadlines import deadline_in
from wsync.ends import SenderEnd
from wsync.layout import Layout
from wsync.roll import Roll
from wsync.shortcut import Rest, Shortcut
from wsync.source import Source
from wsync.types import SyncReport


class ShortWay:
    """The short way of one sender, while there is one.

    Args:
        end: offers it.
        source: what a send without weights means.
        roll: of the workers.
        answers: of theirs, where an update has to go on the long way.
        published: whether a send is finished without answers.
    """

    def __init__(self, end: SenderEnd, source: Source, roll: Roll, answers: Answers, *, published: bool) -> None:
        self._end = end
        self._source = source
        self._roll = roll
        self._answers = answers
        self._published = published
        self.known: Shortcut | None = None

    def find(self, weights: object, layout: Layout) -> None:
        """Know the way of updates like this one, which went to everybody."""
        if self._roll.absent or self._roll.extra:
            return
        way, express = self._source.way(weights, layout), self._end.express()
        update = None if express is None else express.update(not self._published)
        if way is not None and express is not None and update is not None:
            self.known = Shortcut(way, self._source.weights, update, express.complete)

    def forget(self) -> None:
        """Something has happened that is not usual."""
        self.known = None

    def send(self, short: Shortcut, tensors: Any, version: int, began: float) -> SyncReport | None:
        """Deliver what ``Shortcut.find`` has found; None, with nothing done, if it is unusual in any respect."""
        report = short.update(tensors, version, self._answers.timeout, began)
        if report is None:
            return None
        if not isinstance(report, SyncReport):
            report = self._go_on(short, Rest(*report), version, began)
        self._roll.due.update(report.workers)
        return report

    def _go_on(self, short: Shortcut, rest: Rest, version: int, began: float) -> SyncReport:
        """Take the long way where the short one has ended: somebody has died, or failed, or said something else."""
        self.forget()
        workers, timeout = self._roll.present, self._answers.timeout
        left = None if timeout is None else max(0.0, timeout - (time.perf_counter() - began))
        self._roll.note(version, ((workers, b""),))
        short.complete(rest, version, not self._published)
        if self._published:
            self._answers.hear_of_failures(workers, version)
        else:
            self._answers.expect(workers, version, deadline_in(left))
        return rest.report._replace(seconds=time.perf_counter() - began)
