"""The conductor: starts the sides of a case, lets them take turns, and sees that they end."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from typing import Any

import cloudpickle

from bench import trainer
from bench.cases import Acting, Case, Memory, Round

_GRACE = 15.0  # seconds in which a side has to end
_TURNS = 10  # that each side takes
_WARM = 5  # rounds that are checked and not counted


@dataclass
class Measured:
    """What one side did in a case.

    Attributes:
        error: why it could not be measured, or no further; else empty.
        trace: the same, for who has to find out.
    """

    rounds: list[Round] = field(default_factory=list)
    warm: list[Round] = field(default_factory=list)
    acting: Acting | None = None
    memory: list[Memory] = field(default_factory=list)
    error: str = ""
    trace: str = ""


class SideFailed(Exception):
    """A side cannot go on.

    Args:
        summary: why.
        trace: where, if that is known.
    """

    def __init__(self, summary: str, trace: str = "") -> None:
        super().__init__(summary)
        self.trace = trace


class SideProcess:
    """A side, as seen by the conductor.

    Args:
        name: for people.
        make: a ``trainer.MakeSide``.
        case: what is measured.
    """

    def __init__(self, name: str, make: trainer.MakeSide, case: Case) -> None:
        context = multiprocessing.get_context("forkserver")
        self.name, self._timeout = name, case.timeout
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=trainer.main, args=(theirs, cloudpickle.dumps(make), case))
        self._process.start()
        theirs.close()

    def ask(self, command: str, number: int = 0, seconds: float = 0.0) -> Any:
        """Have it do something; its answer.

        Args:
            command: see ``trainer.main``.
            number: how many.
            seconds: after which it begins no more.

        Raises:
            SideFailed: it says so, or has ended, or did not answer in time.
        """
        with suppress(BrokenPipeError):  # what it has said before is still to be read
            self._line.send((command, number, seconds))
        return self.hear(seconds)

    def hear(self, patience: float = 0.0) -> Any:
        """What it says next, after ``patience`` seconds of work; else as ``ask``."""
        limit = self._timeout + patience
        try:
            if not self._line.poll(limit):
                raise SideFailed(f"{self.name} did not answer within {limit:g} s")
            answer = self._line.recv()
        except (EOFError, ConnectionError) as error:
            raise SideFailed(f"{self.name} has ended") from error
        if isinstance(answer, trainer.Failure):
            raise SideFailed(answer.summary, answer.trace)
        return answer

    def hang_up(self) -> None:
        """Have it end as soon as it has done what it is doing."""
        self._line.close()

    def close(self) -> None:
        """See that it ends, and whatever it has left."""
        self.hang_up()
        self._process.join(_GRACE)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._process.close()


def warm_up() -> None:
    """Start the server that sides are forked from, while this process imports what it needs."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["collectors", "collectors.workers.worker"])
    forkserver.ensure_running()


def measure(
    case: Case, sides: Mapping[str, trainer.MakeSide], *, rounds: int, acting: int, seconds: float
) -> dict[str, Measured]:
    """Measure a case: all sides are alive at once, and take turns.

    Args:
        case: what is measured.
        sides: by name.
        rounds: of each side.
        acting: updates to workers that forward in a tight loop.
        seconds: that a side's turns may take, together.
    """
    results = {name: Measured() for name in sides}
    with ExitStack() as stack:
        alive: dict[str, SideProcess] = {}
        for name, make in sides.items():
            alive[name] = SideProcess(name, make, case)
            stack.callback(alive[name].close)
        for side in alive.values():
            stack.callback(side.hang_up)  # all of them, before the first one is waited for
        for name, side in list(alive.items()):
            with _reported(results[name], alive, name):
                side.hear(case.timeout)
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
    """Note that a side has failed; the others go on."""
    try:
        yield
    except SideFailed as error:
        result.error, result.trace = str(error), error.trace
        alive.pop(name, None)


def wrong(measured: Measured) -> Sequence[str]:
    """Whatever a worker saw that was not what it had been sent."""
    found = [one.wrong for one in (*measured.warm, *measured.rounds) if one.wrong]
    acting = measured.acting
    if acting is not None:
        found += [acting.wrong] if acting.wrong else []
        for worker, pauses in enumerate(acting.pauses):
            if pauses.mixed:
                found.append(f"worker {worker}: {pauses.mixed} of {pauses.forwards} forwards saw two versions")
            if pauses.backwards:
                found.append(f"worker {worker}: {pauses.backwards} forwards saw an older version than before")
    return found
