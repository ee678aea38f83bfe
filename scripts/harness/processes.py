"""Worker processes of the scripts, each with a pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

import wsync
from harness.models import RevealingModel

_GRACE = 15.0  # seconds in which processes have to end


class WorkerError(Exception):
    """A worker has ended, or did not answer in time."""


class WorkerPipes:
    """The pipes to all workers, by index; each worker has to answer within ``timeout`` seconds."""

    def __init__(self, pipes: list[Connection], timeout: float) -> None:
        self.pipes = pipes
        self._timeout = timeout

    def send(self, message: object) -> None:
        """Send a message to every worker."""
        for channel in self.pipes:
            channel.send(message)

    def receive(self) -> list[Any]:
        """Return one message of each worker, by index; WorkerError: one has ended, or did not answer in time."""
        deadline, answers = time.monotonic() + self._timeout, []
        for worker, channel in enumerate(self.pipes):
            try:
                if not channel.poll(max(0.0, deadline - time.monotonic())):
                    raise WorkerError(f"worker {worker} did not answer within {self._timeout:g} s")
                answers.append(channel.recv())
            except (EOFError, ConnectionError) as error:
                raise WorkerError(f"worker {worker} has ended") from error
        return answers

    def ask(self, message: object) -> list[Any]:
        """Send a message to every worker; return the answers."""
        self.send(message)
        return self.receive()


@contextmanager
def worker_processes(
    target: Callable[..., None], count: int, *arguments: Any, timeout: float = 60.0
) -> Iterator[WorkerPipes]:
    """Start processes that run ``target(pipe, worker_idx, *arguments)``, which ends when the pipe does.

    They are forked from a server that has imported wsync. What has not ended after the context is killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["harness.processes", "collectors", "rich.table", "typer"])
    pipes, processes = list[Connection](), list[Any]()
    try:
        for worker in range(count):
            mine, theirs = context.Pipe()
            pipes.append(mine)
            processes.append(context.Process(target=_run, args=(target, theirs, worker, *arguments)))
            processes[-1].start()
            theirs.close()
        yield WorkerPipes(pipes, timeout)
    finally:
        for channel in pipes:
            channel.close()
        until = time.monotonic() + _GRACE
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()


def _run(target: Callable[..., None], *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's, which closes the pipe
    torch.set_num_threads(1)
    target(*arguments)


def receive_updates(channel: Connection, worker: int, scheme: wsync.WeightSyncScheme, mib: float, tensors: int) -> None:
    """Receive updates of a ``RevealingModel`` until the trainer closes the pipe; a target of ``worker_processes``."""
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
