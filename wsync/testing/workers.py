"""Workers of tests: processes that are started once, run the commands of a test one by one, and serve many tests."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import ProcessError
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeVar

import wsync.testing.commands as commands
from wsync.testing.commands import WorkerState

ANSWER_TIMEOUT = 60.0
"""Seconds for the outcome of a command. None takes as long; a test that needs it all has failed."""

PRELOADED_MODULES = ["wsync.testing"]
"""What the fork server imports once, before it starts workers. To be extended before the first worker is started."""

R = TypeVar("R")


# --- in the worker's process ---


def execute(state: WorkerState, command: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one command; return its outcome: what it returns, or what it raises, as text in a ``ProcessError``."""
    try:
        return command(state, *args, **kwargs)
    except Exception as error:  # noqa: BLE001  any error of a command is its outcome, which the test judges
        return ProcessError(f"{type(error).__name__}: {error}")


def serve(pipe: Connection) -> None:
    """A worker's main function: run commands until the test closes its end of the pipe, or sends None."""
    state = WorkerState()
    with suppress(EOFError, ConnectionError):  # the test's process has ended
        while (message := pipe.recv()) is not None:
            sys.path[:], request = message  # the path as in the test's process: the request names its modules
            pipe.send_bytes(ForkingPickler.dumps(execute(state, _execute_pickled, (request,), {})))
    for scheme in state.schemes.values():
        scheme.shutdown()


def _execute_pickled(state: WorkerState, request: bytes) -> Any:
    command, args, kwargs = pickle.loads(request)
    return command(state, *args, **kwargs)


# --- in the test's process ---


class Worker:
    """One worker, as a test uses it: a process with a pipe.

    A subclass is a worker of another kind. It sets ``pid`` and ``sentinel``, overrides ``post``, ``outcome``, ``kill``
    and ``close``, and runs ``execute`` for each command, with one ``WorkerState`` for all.

    Args:
        method: how it is started: ``"forkserver"``, ``"spawn"`` or ``"fork"``.
        main: its main function, which is given the worker's end of the pipe, then ``args``.

    Attributes:
        pid, sentinel: of its process: the id, and a descriptor that is readable when it has ended.
        alive: until the test kills it.
    """

    alive = True
    _stopped = False
    _pending = 0

    def __init__(self, method: str = "forkserver", main: Callable[..., None] = serve, args: Sequence[Any] = ()) -> None:
        multiprocessing.set_forkserver_preload(PRELOADED_MODULES)
        context: Any = multiprocessing.get_context(method)
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=main, args=(theirs, *args))
        self._process.daemon = False  # it may have workers of its own
        self._process.start()
        self.pid: int = self._process.pid
        self.sentinel: int = self._process.sentinel
        theirs.close()

    def post(self, command: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any], /) -> None:
        """Send a command. Called by ``start``."""
        self.pipe.send((sys.path, bytes(ForkingPickler.dumps((command, args, kwargs)))))

    def outcome(self) -> Any:
        """Wait for the outcome of the oldest command. Called by ``result``."""
        assert self.pipe.poll(ANSWER_TIMEOUT), f"worker process {self.pid} did not answer in {ANSWER_TIMEOUT} s"
        return self.pipe.recv()

    def kill(self) -> None:
        """SIGKILL; returns when the process has ended."""
        self.alive = False
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        """End the process, in order if it can, else by SIGKILL, and wait for its end."""
        if self.reusable:
            with suppress(ConnectionError):
                self.pipe.send(None)
            self._process.join(5.0)
        self.pipe.close()
        self.kill()
        self._process.close()

    @property
    def reusable(self) -> bool:
        """Whether another test may use it: it was neither killed nor stopped, and has no command to answer."""
        return self.alive and not self._stopped and not self._pending

    def start(self, command: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Send a command; ``result`` waits for its outcome."""
        self._pending += 1
        self.post(command, args, kwargs)

    def result(self) -> Any:
        """Wait for the outcome of the oldest command, and return its value.

        ProcessError: the command raised. AssertionError: no outcome came within ``ANSWER_TIMEOUT``.
        """
        outcome = self.outcome()
        self._pending -= 1
        if isinstance(outcome, ProcessError):
            raise outcome
        return outcome

    def call(self, command: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """``start`` and ``result``."""
        self.start(command, *args, **kwargs)
        return self.result()

    def stop(self) -> None:
        self._stopped = True
        stop_process(self.pid)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


def stop_process(pid: int) -> None:
    """Send SIGSTOP; return when no thread of the process runs any more, which the signal alone does not ensure."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + ANSWER_TIMEOUT
    while any(state_of(thread) not in "TtX" for thread in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} did not stop"
        os.sched_yield()


def state_of(thread: Path) -> str:
    """Return the letter of a thread's state, see proc(5), by the thread's folder in /proc; X if it has ended."""
    try:
        return (thread / "stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # between the listing of the folder and this
        return "X"


class WorkerGroup:
    """The workers of one test, by index. Iteration goes over those that the test has not killed."""

    def __init__(self, pool: WorkerPool, count: int) -> None:
        self._pool = pool
        self._members = pool.take(count)
        self.used = [*self._members]

    def __getitem__(self, index: int) -> Worker:
        return self._members[index]

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Worker]:
        return (worker for worker in self._members if worker.alive)

    def replace(self, index: int) -> Worker:
        """Return another worker, which has the index from now on."""
        (self._members[index],) = added = self._pool.take(1)
        self.used += added
        return self._members[index]

    def results(self) -> list[Any]:
        """Wait for the outcome of the oldest command of each."""
        return [worker.result() for worker in self]

    def call(self, command: Callable[..., R], *args: Any, **kwargs: Any) -> list[R]:
        """Have each run a command, side by side; return what they return."""
        for worker in self:
            worker.start(command, *args, **kwargs)
        return self.results()


class WorkerPool:
    """Worker processes that serve one test after the other; those that a test leaves unusable are replaced.

    For ``BackendHooks.pool_type``, a subclass overrides ``start_workers``: ``[Worker("spawn") for _ in range(count)]``.
    """

    def __init__(self) -> None:
        self._idle: list[Worker] = []

    def start_workers(self, count: int) -> list[Worker]:
        """Start ``count`` workers, and return them. Overridden for workers of another kind."""
        return [Worker() for _ in range(count)]

    def discard(self, worker: Worker) -> None:
        """End a worker that no other test may use."""
        worker.close()

    def take(self, count: int) -> list[Worker]:
        """``count`` workers that no test uses."""
        taken = [self._idle.pop() for _ in range(min(count, len(self._idle)))]
        return taken + self.start_workers(count - len(taken))

    @contextmanager
    def group(self, count: int) -> Iterator[WorkerGroup]:
        """Workers for one test.

        AssertionError: a thread of wsync's is left in one of them after ``shutdown``. ProcessError: that failed.
        """
        group, left = WorkerGroup(self, count), dict[Worker, list[str]]()
        try:
            yield group
            left = {worker: worker.call(commands.reset) for worker in group.used if worker.reusable}
        finally:  # after an error, what the test has left in them is not known
            for worker in group.used:
                if left.get(worker) == []:
                    self._idle.append(worker)
                else:
                    self.discard(worker)
        assert not any(left.values()), f"threads are left in workers after shutdown: {[*left.values()]}"

    def close(self) -> None:
        """End all workers."""
        while self._idle:
            self._idle.pop().close()
