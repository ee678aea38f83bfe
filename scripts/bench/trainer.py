"""The process of one side: a trainer that makes updates on command."""

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
from harness.models import fill
from harness.processes import WorkerError

from bench.config import BenchError, Case
from bench.measurements import PlainCopy, Round, cpu_seconds
from bench.sides import Side

MakeSide = Callable[[Case, int], AbstractContextManager[Side]]
"""Makes a side of a case, for a trainer with this process id."""


@dataclass(frozen=True)
class Failure:
    """An error of a side, and its traceback."""

    summary: str
    trace: str


class Rounds:
    """Makes updates, each with a value that no update had before.

    Args:
        side: sends them.
        copy: is timed in turn with them.
        interrupted: whether to make no more.
    """

    def __init__(self, side: Side, copy: PlainCopy, interrupted: Callable[[], bool]) -> None:
        self._side, self._copy, self._interrupted = side, copy, interrupted
        self._value = 0

    def run(self, count: int, seconds: float) -> list[Round]:
        """Make ``count`` rounds, or as many as begin within ``seconds``."""
        done: list[Round] = []
        until = time.monotonic() + seconds
        while len(done) < count and time.monotonic() < until and not self._interrupted():
            done.append(self._round())
        return done

    def _round(self) -> Round:
        side, pids = self._side, self._side.pids.values()
        self._value += 1
        fill(side.model, self._value)
        workers = [cpu_seconds(pid) for pid in pids]
        trainer, started = time.process_time(), time.perf_counter()
        side.send()
        seconds, trainer = time.perf_counter() - started, time.process_time() - trainer
        used = sum(cpu_seconds(pid) for pid in pids) - sum(workers)
        copied = self._copy.seconds(self._value)
        return Round(seconds, copied, trainer, used, dict(side.phases()), side.wrong(self._value))

    def act(self, sends: int) -> object:
        """See ``Standalone.act``."""
        first, self._value = self._value + 1, self._value + sends
        return self._side.act(first, sends)


def main(channel: Connection, make: bytes, case: Case) -> None:
    """Execute the conductor's commands until it closes the pipe; then end all processes of this side.

    Args:
        channel: the channel to the conductor. Sends ``ready``, then answers each ``(command, number, seconds)``; or
            ``Failure``.
        make: a pickled ``MakeSide``.
        case: what is measured.
    """
    os.setsid()  # the conductor can kill the whole session; and Ctrl-C reaches the conductor alone
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    try:
        make_side: MakeSide = cloudpickle.loads(make)
        copy = PlainCopy(int(case.mib * 2**20))  # before memory is measured
        with make_side(case, os.getpid()) as side:
            _serve(channel, Rounds(side, copy, channel.poll), side)
        channel.send("ended")
    except (BrokenPipeError, EOFError):
        return  # the conductor has closed the pipe
    except Exception as error:  # noqa: BLE001  any error is shown by the conductor
        kind = "" if isinstance(error, BenchError | WorkerError) else f"{type(error).__name__}: "
        channel.send(Failure(f"{kind}{error}", traceback.format_exc()))


def _serve(channel: Connection, rounds: Rounds, side: Side) -> None:
    channel.send("ready")
    while True:
        command, number, seconds = channel.recv()
        if command == "end":
            return
        if command == "run":
            channel.send(rounds.run(number, seconds))
        elif command == "act":
            channel.send(rounds.act(number))
        else:
            channel.send(side.memory.read())
