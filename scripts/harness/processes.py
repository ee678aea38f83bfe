"""Worker processes of the scripts, each with a pipe."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

import wsync
from collectors.workers.processes import join_or_kill, pipe, start
from harness.models import RevealingModel


class WorkerError(Exception):
    """A worker has ended, or did not answer in time."""


class WorkerPipes:
    """The pipes to all workers.

    Args:
        pipes: by worker index.
        timeout: seconds in which each worker has to answer.
        sentinels: the sentinels of the processes; readable when a process has ended.
    """

    def __init__(self, pipes: list[Connection], timeout: float, sentinels: list[int] | None = None) -> None:
        self.pipes, self.sentinels = pipes, sentinels or []
        self._timeout = timeout

    def send(self, message: object) -> None:
        """Send a message to every worker."""
        for channel in self.pipes:
            channel.send(message)

    def receive(self) -> list[Any]:
        """Return one message of each worker, by index.

        Raises:
            WorkerError: a worker has ended, or did not answer in time.
        """
        deadline, answers = time.monotonic() + self._timeout, []
        for worker, channel in enumerate(self.pipes):
            try:
                if not channel.poll(max(0.0, deadline - time.monotonic())):
                    raise WorkerError(f"worker {worker} did not answer within {self._timeout:g} s")
                answers.append(channel.recv())
            except (EOFError, ConnectionError) as error:
                raise WorkerError(f"worker {worker} has ended") from error
        return answers


def receive_updates(channel: Connection, worker: int, scheme: wsync.WeightSyncScheme, mib: float, tensors: int) -> None:
    """Receive updates of a ``RevealingModel`` until the trainer closes the pipe; a target of ``worker_processes``."""
    torch.set_num_threads(1)
    scheme.init_on_receiver("policy", model=RevealingModel(mib, tensors), worker_idx=worker)
    scheme.connect()
    try:
        channel.recv()
    except EOFError:
        scheme.shutdown()


def echo(channel: Connection, worker: int) -> None:
    """Return each byte until the trainer closes the pipe; a target of ``worker_processes``."""
    while byte := os.read(channel.fileno(), 1):
        os.write(channel.fileno(), byte)


@contextmanager
def worker_processes(
    target: Callable[..., None], count: int, *arguments: Any, timeout: float = 60.0
) -> Iterator[WorkerPipes]:
    """Start processes that run ``target(pipe, worker_idx, *arguments)``; end them when the context ends.

    ``target`` must be importable: workers do not have the script's ``__main__``.
    """
    pipes: list[Connection] = []
    processes: list[Any] = []
    try:
        for worker in range(count):
            mine, theirs = pipe()
            pipes.append(mine)
            processes.append(start(target, worker, theirs, worker, *arguments))
            theirs.close()
        yield WorkerPipes(pipes, timeout, [process.sentinel for process in processes])
    finally:
        for channel in pipes:
            channel.close()
        join_or_kill(processes)
