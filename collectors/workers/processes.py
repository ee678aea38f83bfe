"""Processes that the trainer starts on its own machine, and workers in them."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from collectors.workers.hold import Hold
from collectors.workers.line_pool import LinePool, LineWorker
from collectors.workers.lines import Line, SharedMemoryLine, serve
from collectors.workers.pool import GRACE
from collectors.workers.worker import end_with_process, leave_signals_to_the_trainer

_hiding = threading.Lock()  # collectors may be made in several threads at once; all have the same __main__


@contextmanager
def _without_main() -> Iterator[None]:
    """Keep a new process from running the trainer's script again.

    What a worker is given is pickled by value where it comes from ``__main__``, so it does not need that module; and a
    script without an ``if __name__ == "__main__"`` works.
    """
    names = vars(sys.modules["__main__"])
    with _hiding:
        hidden = {name: names[name] for name in ("__spec__", "__file__") if name in names}
        names["__spec__"] = None
        names.pop("__file__", None)
        try:
            yield
        finally:
            names.update(hidden)


def _context() -> BaseContext:
    """A fork server with the heavy imports made once, so that a worker starts in a fraction of a second."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["collectors.workers.worker"])
    return server


def _begin(
    target: Callable[..., None], trainer: int, environment: Mapping[str, str], arguments: tuple[Any, ...]
) -> None:
    leave_signals_to_the_trainer()
    end_with_process(trainer)
    os.environ.clear()
    os.environ.update(environment)  # the fork server has what the trainer had when it was first needed
    torch.seed()  # the children of one fork server have its generators: they would draw the same numbers
    np.random.seed()
    target(*arguments)


def start(target: Callable[..., None], worker_idx: int, *arguments: Any) -> BaseProcess:
    """A process with this environment that runs ``target(*arguments)``, leaves signals to the trainer, ends with it."""
    process = _context().Process(  # pyright: ignore[reportAttributeAccessIssue]
        target=_begin, args=(target, os.getpid(), dict(os.environ), arguments), name=f"collector-worker-{worker_idx}"
    )
    with _without_main():
        process.start()
    return process


def pipe() -> tuple[Connection, Connection]:
    """The trainer's end and the process's end of a pipe."""
    return _context().Pipe()  # pyright: ignore[reportAttributeAccessIssue]


def end_of(process: BaseProcess) -> str:
    """How a process has ended."""
    process.join(GRACE)
    return f"(process {process.pid}) died with exit code {process.exitcode}"


def end(processes: Collection[BaseProcess]) -> None:
    """Wait for processes that were told to end, and kill those who do not; all of them, if the wait is interrupted."""
    deadline = time.monotonic() + GRACE
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:  # a second Ctrl-C: nobody may be left whom this process would wait for when it exits
        for process in processes:
            kill(process)


def kill(process: BaseProcess) -> None:
    """End a process, whatever it is doing, and let go of it."""
    process.kill()
    process.join()
    process.close()


class ProcessWorker(LineWorker):
    """A worker in a process of its own."""

    def __init__(self, worker_idx: int, line: Line, process: BaseProcess) -> None:
        super().__init__(worker_idx, line)
        self.process = process
        self.hold = Hold(process.pid)

    @property
    def sentinel(self) -> int:
        """Readable when the process has ended."""
        return self.process.sentinel

    def last_words(self) -> str:
        """See LineWorker."""
        return end_of(self.process)

    def close(self) -> None:
        """Let go of the line, upon which the process ends, and of the hold on it."""
        self.line.connection.close()
        self.hold.close()

    def end(self) -> None:
        """Kill the process if it still runs, and let go of it and of the line."""
        self.close()
        kill(self.process)


def start_worker(
    main: Callable[..., None], worker_idx: int, line: Callable[..., Line], *arguments: Any
) -> ProcessWorker:
    """A process that runs ``main(connection, *arguments)``, at the other end of a ``line(connection, *arguments)``."""
    mine, theirs = pipe()
    try:
        process = start(main, worker_idx, theirs, *arguments)
    except BaseException:
        mine.close()
        raise
    finally:
        theirs.close()
    return ProcessWorker(worker_idx, line(mine, *arguments), process)


class ProcessPool(LinePool[ProcessWorker]):
    """Worker processes on this machine, whose batches lie in memory that is shared with them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        try:
            for i in range(count):
                self.begin(i)
        except BaseException:
            self.close()
            raise

    def begin(self, worker_idx: int) -> ProcessWorker:
        """See Pool."""
        worker = start_worker(_main, worker_idx, SharedMemoryLine, os.getpid())
        self.workers.append(worker)
        return worker

    def let_go(self, worker: ProcessWorker) -> None:
        """See Pool."""
        self.workers.remove(worker)
        worker.end()

    def close(self) -> None:
        """See Pool."""
        for worker in self.workers:
            worker.close()
        end([worker.process for worker in self.workers])
        self.workers = []


def _main(connection: Connection, trainer: int) -> None:
    serve(SharedMemoryLine(connection, trainer))
