"""The process of one side: a trainer, who does rounds when the conductor says so."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import cloudpickle
import torch

from bench.cases import BenchError, Case, Round
from bench.meters import cpu_seconds
from bench.models import become
from bench.sides import Side

MakeSide = Callable[[Case, int], AbstractContextManager[Side]]
"""Makes a side of a case, for a trainer of this process id."""


@dataclass(frozen=True)
class Failure:
    """What went wrong, for people, and where."""

    summary: str
    trace: str


class PlainCopy:
    """A copy of ``nbytes`` bytes of float32, as ``Tensor.copy_`` makes it."""

    def __init__(self, nbytes: int) -> None:
        self._source, self._target = torch.rand(nbytes // 4), torch.rand(nbytes // 4)

    def seconds(self, value: float) -> float:
        """Of one copy of new values."""
        self._source.fill_(value)
        started = time.perf_counter()
        self._target.copy_(self._source)
        return time.perf_counter() - started


class Rounds:
    """Updates, each with weights that there were never before.

    Args:
        side: makes them.
        copy: is timed in turn with them.
        interrupted: whether to make no more.
    """

    def __init__(self, side: Side, copy: PlainCopy, interrupted: Callable[[], bool]) -> None:
        self._side, self._copy, self._interrupted = side, copy, interrupted
        self._value = 0

    def run(self, count: int, seconds: float) -> list[Round]:
        """Do ``count`` of them, or as many as can be begun in so many seconds."""
        done: list[Round] = []
        until = time.monotonic() + seconds
        while len(done) < count and time.monotonic() < until and not self._interrupted():
            done.append(self._one())
        return done

    def _one(self) -> Round:
        side, pids = self._side, self._side.pids.values()
        self._value += 1
        become(side.model, self._value)
        workers = [cpu_seconds(pid) for pid in pids]
        trainer, started = time.process_time(), time.perf_counter()
        side.send()
        seconds, trainer = time.perf_counter() - started, time.process_time() - trainer
        used = sum(cpu_seconds(pid) for pid in pids) - sum(workers)
        copied = self._copy.seconds(self._value)
        return Round(seconds, copied, trainer, used, dict(side.phases()), side.wrong(self._value))

    def act(self, sends: int) -> object:
        """As ``Side.act``."""
        first, self._value = self._value + 1, self._value + sends
        return self._side.act(first, sends)


def main(line: Connection, make: bytes, case: Case) -> None:
    """Serve the conductor until it hangs up; then nothing of this side is left.

    Args:
        line: to the conductor. Says ``ready``; then takes ``(command, number, seconds)`` and answers each. Or it says
            ``Failure``.
        make: a pickled ``MakeSide``.
        case: what is measured.
    """
    os.setsid()  # the conductor can end all of this side; and Ctrl-C is the conductor's
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    try:
        make_side: MakeSide = cloudpickle.loads(make)
        copy = PlainCopy(int(case.mib * 2**20))  # before memory is watched
        with make_side(case, os.getpid()) as side:
            _serve(line, Rounds(side, copy, line.poll), side)
        line.send("ended")
    except (BrokenPipeError, EOFError):
        return  # the conductor has hung up
    except Exception as error:  # noqa: BLE001  whatever it is, the conductor shows it
        kind = "" if isinstance(error, BenchError) else f"{type(error).__name__}: "
        line.send(Failure(f"{kind}{error}", traceback.format_exc()))


def _serve(line: Connection, rounds: Rounds, side: Side) -> None:
    line.send("ready")
    while True:
        command, number, seconds = line.recv()
        if command == "end":
            return
        if command == "run":
            line.send(rounds.run(number, seconds))
        elif command == "act":
            line.send(rounds.act(number))
        else:
            line.send(side.memory.read())
