"""The trainer's side of its worker processes: start them, talk to them, hear of their failures, end them."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from tensordict import TensorDict

from collectors.worker import WorkerOptions, main
from wsync import WorkerDied, WorkerFailed

_GRACE = 5.0  # seconds in which a worker that was hung up on has to end


@contextmanager
def _without_main() -> Iterator[None]:
    """Keep a new process from running the trainer's script again.

    What a worker is given is pickled by value where it comes from ``__main__``, so it does not need that module; and a
    script without an ``if __name__ == "__main__"`` works.
    """
    names = vars(sys.modules["__main__"])
    hidden = {name: names[name] for name in ("__spec__", "__file__") if name in names}
    names["__spec__"] = None
    names.pop("__file__", None)
    try:
        yield
    finally:
        names.update(hidden)


def context() -> BaseContext:
    """A fork server with the heavy imports made once, so that a worker starts in a fraction of a second."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["collectors.worker"])
    return server


class Worker:
    """One worker process (a ``wsync.RemoteWorker``)."""

    def __init__(self, process: BaseProcess, line: Connection, worker_idx: int) -> None:
        self.process = process
        self.line = line
        self.worker_idx = worker_idx
        self.num_envs = 0
        self.batches: list[TensorDict] = []

    @property
    def sentinel(self) -> int:
        """Readable when the process has ended."""
        return self.process.sentinel


class Pool:
    """Worker processes, each with a line of its own.

    Args:
        parts: what each is to act with, pickled.
        options: one per worker.
    """

    def __init__(self, parts: Sequence[bytes], options: Sequence[WorkerOptions]) -> None:
        self.workers: list[Worker] = []
        self._heard: deque[tuple[Worker, str, Any]] = deque()
        ctx = context()
        try:
            for blob, chosen in zip(parts, options, strict=True):
                mine, theirs = ctx.Pipe()
                name = f"collector-worker-{chosen.worker_idx}"
                process = ctx.Process(target=main, args=(theirs, blob, chosen), name=name)  # pyright: ignore[reportAttributeAccessIssue]
                with _without_main():
                    process.start()
                theirs.close()
                self.workers.append(Worker(process, mine, chosen.worker_idx))
        except BaseException:
            self.close()
            raise

    def tell(self, workers: Collection[Worker], command: str, argument: Any = None) -> None:
        """Send a command; who is gone is heard of when one listens."""
        for worker in workers:
            try:
                worker.line.send((command, argument))
            except ConnectionError:
                continue

    def hear(self, expected: str, workers: Collection[Worker]) -> tuple[Worker, Any]:
        """The next answer from one of ``workers``.

        Raises:
            WorkerFailed: one raised; carries its traceback.
            WorkerDied: one's process ended.
        """
        while not self._heard:
            lines = {worker.line: worker for worker in workers}
            sentinels = {worker.sentinel: worker for worker in workers}
            ready = wait([*lines, *sentinels])
            # What a worker said before it ended comes first.
            for line in sorted(ready, key=lambda one: isinstance(one, int)):
                worker = sentinels[line] if isinstance(line, int) else lines[line]  # pyright: ignore[reportArgumentType]
                if not isinstance(line, int) or not worker.line.poll():
                    self._listen(worker)
        worker, kind, answer = self._heard.popleft()
        if kind == "error":
            cause = f"worker {worker.worker_idx} failed:\n{answer}"
            raise WorkerFailed(cause, {worker.worker_idx: answer})
        if kind == "died":
            raise WorkerDied(f"worker {worker.worker_idx} {answer}", {worker.worker_idx: answer})
        assert kind == expected, f"a worker answered {kind} where {expected} was due"
        return worker, answer

    def hear_all(self, expected: str) -> list[tuple[Worker, Any]]:
        """One answer from every worker, in the order of their indices."""
        missing, answers = set(self.workers), []
        while missing:
            worker, answer = self.hear(expected, missing)
            missing.discard(worker)
            answers.append((worker, answer))
        return sorted(answers, key=lambda pair: pair[0].worker_idx)

    def _listen(self, worker: Worker) -> None:
        try:
            kind, answer = worker.line.recv()
            if kind == "ready":
                plan, worker.num_envs = answer
                descriptor = reduction.recv_handle(worker.line)  # pyright: ignore[reportAttributeAccessIssue]
                worker.batches = plan.map(descriptor, os.fstat(descriptor).st_size // plan.nbytes)
        except (EOFError, ConnectionError):
            worker.process.join(_GRACE)
            kind, answer = "died", f"(process {worker.process.pid}) died with exit code {worker.process.exitcode}"
        self._heard.append((worker, kind, answer))

    def close(self) -> None:
        """Hang up on all, wait for them to end, and end those who do not."""
        for worker in self.workers:
            worker.line.close()
        for worker in self.workers:
            worker.process.join(_GRACE)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.process.close()
            worker.batches = []
        self.workers = []
