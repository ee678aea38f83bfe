"""The trainer's end of the workers of a standalone send: processes, members of an RPC group, Ray actors."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol

import cloudpickle
import torch
from torch.distributed import rpc

import wsync
from bench.cases import BenchError, Case
from bench.hands import Follow, follow_pickled, meet
from bench.models import Revealing
from collectors.distributed.doors import Address
from collectors.workers.processes import pipe, start

_GRACE = 5.0  # seconds in which a worker that was hung up on has to end


class Lines:
    """Lines to all workers, by index.

    Args:
        lines: their pipes.
        timeout: seconds in which each has to answer.
    """

    def __init__(self, lines: Sequence[Connection], timeout: float) -> None:
        self.lines = list(lines)
        self._timeout = timeout

    def say(self, word: str) -> None:
        """Tell all of them."""
        for line in self.lines:
            line.send(word)

    def hear(self) -> list[Any]:
        """An answer of each.

        Raises:
            BenchError: one has ended, or did not answer in time.
        """
        deadline, answers = time.monotonic() + self._timeout, []
        for worker, line in enumerate(self.lines):
            try:
                if not line.poll(max(0.0, deadline - time.monotonic())):
                    raise BenchError(f"worker {worker} did not answer within {self._timeout:g} s")
                answers.append(line.recv())
            except (EOFError, ConnectionError) as error:
                raise BenchError(f"worker {worker} has ended") from error
        return answers


class Crew(Protocol):
    """Workers, as a side sees them."""

    pids: Sequence[int]

    def connect(self, scheme: wsync.WeightSyncScheme, model: Revealing) -> Lines:
        """Have all follow ``model`` by ``scheme``."""
        ...


class ProcessCrew:
    """Worker processes that wait for a scheme."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self.pids: Sequence[int] = lines.hear()

    def connect(self, scheme: wsync.WeightSyncScheme, model: Revealing) -> Lines:
        """See Crew."""
        scheme.init_on_sender("policy", model=model, num_workers=len(self.pids))
        pickled = cloudpickle.dumps(scheme)
        for line in self._lines.lines:
            line.send_bytes(pickled)
        scheme.connect()
        self._lines.hear()
        return self._lines


@contextmanager
def process_crew(case: Case) -> Iterator[ProcessCrew]:
    """Plain processes."""
    with started(case, follow_pickled) as (lines, _):
        yield ProcessCrew(lines)


@contextmanager
def rpc_crew(case: Case) -> Iterator[ProcessCrew]:
    """Processes in an RPC group with this one."""
    from collectors.distributed.rpc_group import host_store, join_or_end, leave_group

    store, address = host_store("127.0.0.1")
    with started(case, follow_pickled, address) as (lines, sentinels):
        if join_or_end(case.workers + 1, address, sentinels, case.timeout) is not None:
            raise BenchError("a worker ended before it had joined the RPC group")
        try:
            yield ProcessCrew(lines)
        except BaseException:
            leave_group()  # whoever is still there
            raise
        rpc.shutdown(timeout=_GRACE)  # together with the workers
    del store


@contextmanager
def started(case: Case, follow: Follow, group: Address | None = None) -> Iterator[tuple[Lines, list[int]]]:
    """Start worker processes that ``follow``; their lines and sentinels. At the end none is left."""
    pipes = [pipe() for _ in range(case.workers)]
    processes: list[Any] = []
    try:
        for worker, (_, theirs) in enumerate(pipes):
            processes.append(start(_work, worker, theirs, case, worker, follow, group))
            theirs.close()
        yield Lines([mine for mine, _ in pipes], case.timeout), [process.sentinel for process in processes]
    finally:
        for mine, _ in pipes:
            mine.close()
        deadline = time.monotonic() + _GRACE
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
            process.close()


def _work(line: Connection, case: Case, worker: int, follow: Follow, group: Address | None) -> None:
    """A worker process: until it is dismissed, or hung up on."""
    torch.set_num_threads(1)
    with _member(worker, case, group), suppress(EOFError, ConnectionError):
        meet(line, case, worker, follow)


@contextmanager
def _member(worker: int, case: Case, group: Address | None) -> Iterator[None]:
    """Be in the RPC group, if there is one."""
    if group is None:
        yield
        return
    from collectors.distributed.rpc_group import join_group

    join_group(f"worker{worker}", worker + 1, case.workers + 1, group, case.timeout)
    yield
    rpc.shutdown(timeout=_GRACE)  # if the trainer does not, this process is killed
