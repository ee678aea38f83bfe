"""Starts the sides of a case, lets them take turns, and ends them."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from typing import Any

import cloudpickle

from bench import trainer
from bench.config import Case
from bench.measurements import Acting, Memory, Round
from collectors.workers.processes import PRELOAD

_GRACE = 15.0  # seconds in which a side has to end
_TURNS = 10  # of each side
_WARM = 5  # rounds that are checked, but not counted


@dataclass
class Measured:
    """The measurements of one side in a case.

    Attributes:
        rounds: the counted rounds.
        warm: rounds before them, which are checked only.
        acting: updates while workers forward in a tight loop.
        memory: the memory of each process.
        error: why measuring ended; else empty.
        trace: the traceback of the error.
    """

    rounds: list[Round] = field(default_factory=list)
    warm: list[Round] = field(default_factory=list)
    acting: Acting | None = None
    memory: list[Memory] = field(default_factory=list)
    error: str = ""
    trace: str = ""

    @property
    def wrong(self) -> list[str]:
        """Descriptions of what workers saw that was not the update."""
        found = [one.wrong for one in (*self.warm, *self.rounds) if one.wrong]
        if self.acting is not None:
            found += [self.acting.wrong] if self.acting.wrong else []
            for worker, pauses in enumerate(self.acting.pauses):
                if pauses.mixed:
                    found.append(f"worker {worker}: {pauses.mixed} of {pauses.forwards} forwards saw two versions")
                if pauses.backwards:
                    found.append(f"worker {worker}: {pauses.backwards} forwards saw an older version than before")
        return found


class SideFailed(Exception):
    """A side has failed.

    Args:
        summary: the error.
        trace: its traceback, if there is one.
    """

    def __init__(self, summary: str, trace: str = "") -> None:
        super().__init__(summary)
        self.trace = trace


class SideProcess:
    """The process of one side.

    Args:
        name: for errors.
        make: a ``trainer.MakeSide``.
        case: what is measured.
    """

    def __init__(self, name: str, make: trainer.MakeSide, case: Case) -> None:
        context = multiprocessing.get_context("forkserver")
        self.name, self._timeout = name, case.timeout
        self._channel, theirs = context.Pipe()
        self._process = context.Process(target=trainer.main, args=(theirs, cloudpickle.dumps(make), case))
        self._process.start()
        theirs.close()

    def ask(self, command: str, number: int = 0, seconds: float = 0.0) -> Any:
        """Send a command; return the answer.

        Args:
            command: see ``trainer.main``.
            number: the number of rounds or updates.
            seconds: after which no other round begins.

        Raises:
            SideFailed: the side reports an error, has ended, or did not answer in time.
        """
        with suppress(BrokenPipeError):  # an error that it has sent before is read below
            self._channel.send((command, number, seconds))
        return self.receive(seconds)

    def receive(self, patience: float = 0.0) -> Any:
        """What it says next, after ``patience`` seconds of work; else as ``ask``."""
        limit = self._timeout + patience
        try:
            if not self._channel.poll(limit):
                raise SideFailed(f"{self.name} did not answer within {limit:g} s")
            answer = self._channel.recv()
        except (EOFError, ConnectionError) as error:
            raise SideFailed(f"{self.name} has ended") from error
        if isinstance(answer, trainer.Failure):
            raise SideFailed(answer.summary, answer.trace)
        return answer

    def close_pipe(self) -> None:
        """Make the side end after its current command."""
        self._channel.close()

    def close(self) -> None:
        """Wait for its end; kill what is left of its session."""
        self.close_pipe()
        self._process.join(_GRACE)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._process.close()


def warm_up() -> None:
    """Start the fork server, which imports its modules while this process imports the rest."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["collectors", *PRELOAD])
    forkserver.ensure_running()


def measure(
    case: Case, sides: Mapping[str, trainer.MakeSide], *, rounds: int, acting: int, seconds: float
) -> dict[str, Measured]:
    """Measure a case: all sides are alive at once, and take turns.

    Args:
        case: what is measured.
        sides: by name.
        rounds: the number of rounds of each side.
        acting: number of updates to workers that forward in a tight loop.
        seconds: limit for all turns of a side together.
    """
    results = {name: Measured() for name in sides}
    with ExitStack() as stack:
        alive: dict[str, SideProcess] = {}
        for name, make in sides.items():
            alive[name] = SideProcess(name, make, case)
            stack.callback(alive[name].close)
        for side in alive.values():
            stack.callback(side.close_pipe)  # all of them, before the first one is waited for
        for name, side in list(alive.items()):
            with _reported(results[name], alive, name):
                side.receive(case.timeout)
                results[name].warm = side.ask("run", _WARM, seconds)
        _take_turns(alive, results, rounds, seconds)
        for name, side in list(alive.items()):
            with _reported(results[name], alive, name):
                results[name].memory = side.ask("memory")
                results[name].acting = side.ask("act", acting, seconds) if acting else None
                side.ask("end")
    return results


def _take_turns(alive: dict[str, SideProcess], results: Mapping[str, Measured], rounds: int, seconds: float) -> None:
    length = math.ceil(rounds / _TURNS)
    for turn in range(math.ceil(rounds / length)):
        for name, side in list(alive.items()):
            with _reported(results[name], alive, name):
                results[name].rounds += side.ask("run", min(length, rounds - turn * length), seconds / _TURNS)


@contextmanager
def _reported(result: Measured, alive: dict[str, SideProcess], name: str) -> Iterator[None]:
    """Record the failure of a side, and continue with the others."""
    try:
        yield
    except SideFailed as error:
        result.error, result.trace = str(error), error.trace
        alive.pop(name, None)
