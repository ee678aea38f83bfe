"""Generations in flight: paused while weights change; each result names the versions that it was made with."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from wsync.deadlines import deadline_in, remaining
from wsync.engine.protocol import PauseMode
from wsync.errors import WeightSyncError
from wsync.gate import process_gate

_log = logging.getLogger(__name__)


class GenerationAborted(WeightSyncError):
    """This generation was in flight when the trainer paused with ``mode=abort``; what it has so far is valid."""


@dataclass(slots=True)
class Span:
    """Consecutive steps with one version: those from ``start`` to before ``end``."""

    version: str
    start: int
    end: int


class Generation:
    """One sequence that is being generated. One thread uses it.

    Attributes:
        weight_versions: which steps were made with which version; vLLM's outputs have the same field.
    """

    def __init__(self, owner: Generations) -> None:
        self.weight_versions: list[Span] = []
        self.aborted = False
        self._owner = owner

    @property
    def mixed(self) -> bool:
        """Whether steps were made with more than one version."""
        return len(self.weight_versions) > 1

    @contextmanager
    def step(self) -> Iterator[None]:
        """Make one step (a token): inside the gate, so all of it has one version. Waits while generation is paused.

        Raises:
            GenerationAborted: the trainer has paused with ``mode=abort``.
            WeightSyncError: the weights may be of two versions, because a load has failed.
        """
        with self._owner.stepping(self), process_gate().hold():
            version, spans = self._owner.version(), self.weight_versions
            yield
            if not spans or spans[-1].version != version:
                start = spans[-1].end if spans else 0
                spans.append(Span(version, start, start))
            spans[-1].end += 1


class Generations:
    """All generations of one engine.

    Args:
        version: returns the name of the engine's weights, which changes inside the gate.
        pause_limit: seconds after which a pause ends by itself: its trainer may have been killed. None for no limit.
    """

    def __init__(self, version: Callable[[], str], pause_limit: float | None) -> None:
        self.version = version
        self._pause_limit = pause_limit
        self._changed = threading.Condition()  # guards what follows
        self._running: set[Generation] = set()
        self._steps = 0  # in progress
        self._mode: PauseMode | None = None  # while paused
        self._pauses = 0  # how often a pause has begun or ended
        self._limit: float | None = None  # when the pause ends by itself

    @property
    def paused(self) -> bool:
        """Whether generation is paused."""
        with self._changed:
            self._end_at_limit()
            return self._mode is not None

    @contextmanager
    def generation(self) -> Iterator[Generation]:
        """Make one generation. Waits while generation is paused."""
        one = Generation(self)
        with self._changed:
            self._wait_while(lambda: self._mode is not None)
            self._running.add(one)
        try:
            yield one
        finally:
            with self._changed:
                self._running.discard(one)
                self._changed.notify_all()

    @contextmanager
    def stepping(self, one: Generation) -> Iterator[None]:
        """Count one step of a generation; see ``Generation.step``."""
        with self._changed:
            self._wait_while(lambda: self._mode == "keep")  # "wait" lets generations in flight go on
            if one.aborted:
                raise GenerationAborted("generation was paused with mode=abort, to change the weights")
            self._steps += 1
        try:
            yield
        finally:
            with self._changed:
                self._steps -= 1
                self._changed.notify_all()

    def _wait_while(self, waits: Callable[[], bool]) -> None:
        while waits():
            self._changed.wait(remaining(self._limit))
            self._end_at_limit()

    def _end_at_limit(self) -> None:
        if self._mode is not None and remaining(self._limit) == 0.0:
            _log.warning("generation was paused for %s s, and goes on without a /resume", self._pause_limit)
            self._change(None)

    def _change(self, mode: PauseMode | None) -> None:
        self._mode, self._limit = mode, deadline_in(self._pause_limit)
        self._pauses += 1
        self._changed.notify_all()

    def pause(self, mode: PauseMode) -> None:
        """Return when no step runs, and (``wait``) no generation either; none starts until ``resume``.

        Blocks its thread. WeightSyncError: the pause has ended meanwhile.
        """
        with self._changed:
            for one in self._running if mode == "abort" else ():
                one.aborted = True
            self._change(mode)
            own = self._pauses
            self._wait_while(lambda: self._pauses == own and bool(self._running if mode == "wait" else self._steps))
            if self._pauses != own:
                raise WeightSyncError("by /resume, another /pause, or its limit the pause ended before all had paused")

    def resume(self) -> None:
        """End the pause, if there is one."""
        with self._changed:
            self._change(None)
