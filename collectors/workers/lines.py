"""A line between the trainer and a worker: words both ways, and the bytes of batches to the trainer.

Both ends say ``plan, count`` once, right behind the worker's ``ready``, and then ``push`` and ``pull`` a buffer right
behind each ``batch``. How the bytes go is the line's own affair.
"""

from __future__ import annotations

import os
import socket
import struct
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import torch

from collectors.workers.shared_batch import BatchPlan
from collectors.workers.worker import Core, be_a_worker


class Line(ABC):
    """One end of a line.

    Args:
        connection: carries the words, pickled; this end owns it.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def limit(self, seconds: float | None) -> None:
        """Have a read or a write that makes no progress for so many seconds raise ``BlockingIOError``."""
        whole = 0 if seconds is None else int(seconds)
        micro = 0 if seconds is None else max(1, int((seconds - whole) * 1e6))
        with socket.socket(fileno=socket.dup(self.connection.fileno())) as sock:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", whole, micro))

    @abstractmethod
    def offer(self, plan: BatchPlan, count: int) -> list[torch.Tensor]:
        """On the worker's end: buffers to fill."""

    @abstractmethod
    def accept(self, plan: BatchPlan, count: int) -> list[torch.Tensor]:
        """On the trainer's end: buffers that have what was pulled."""

    @abstractmethod
    def push(self, buffer: torch.Tensor) -> None:
        """On the worker's end: bring a filled buffer to the trainer."""

    @abstractmethod
    def pull(self, buffer: torch.Tensor) -> None:
        """On the trainer's end: have what the worker pushes."""


class SharedMemoryLine(Line):
    """A pipe between two processes of one machine; the buffers are one memory, mapped by both.

    Args:
        connection: a Unix socket or pipe of ``multiprocessing``.
        trainer: the trainer's process.
    """

    def __init__(self, connection: Connection, trainer: int) -> None:
        super().__init__(connection)
        self._trainer = trainer

    def offer(self, plan: BatchPlan, count: int) -> list[torch.Tensor]:
        """See Line."""
        memory = plan.share(count)
        reduction.send_handle(self.connection, memory, self._trainer)  # pyright: ignore[reportAttributeAccessIssue]
        return plan.map(memory, count)

    def accept(self, plan: BatchPlan, count: int) -> list[torch.Tensor]:
        """See Line."""
        return plan.map(reduction.recv_handle(self.connection), count)  # pyright: ignore[reportAttributeAccessIssue]

    def push(self, buffer: torch.Tensor) -> None:
        """Nothing to do: it is there."""

    def pull(self, buffer: torch.Tensor) -> None:
        """Nothing to do: it is there."""


class StreamLine(Line):
    """A byte stream between any two machines; each end has buffers of its own, and their bytes follow the words."""

    def offer(self, plan: BatchPlan, count: int) -> list[torch.Tensor]:
        """See Line."""
        return plan.allocate(count)

    def accept(self, plan: BatchPlan, count: int) -> list[torch.Tensor]:
        """See Line."""
        return plan.allocate(count)

    def push(self, buffer: torch.Tensor) -> None:
        """Write it, straight from its memory."""
        left, descriptor = _bytes_of(buffer), self.connection.fileno()
        while left:
            left = left[os.write(descriptor, left) :]

    def pull(self, buffer: torch.Tensor) -> None:
        """Read it, straight into its memory.

        Raises:
            EOFError: the other end has gone.
        """
        left, descriptor = _bytes_of(buffer), self.connection.fileno()
        while left:
            count = os.readv(descriptor, [left])
            if not count:
                raise EOFError("the worker went away within a batch")
            left = left[count:]


def _bytes_of(buffer: torch.Tensor) -> memoryview:
    array: Any = buffer.numpy()  # a Buffer, which its type does not say
    return memoryview(array)


def serve(line: Line) -> None:
    """A worker's loop: serve the trainer at the other end of ``line`` until it hangs up; then close the line.

    The trainer says ``("build", (parts, options))`` first, then what ``Core`` obeys. Answers are ``("ready", (plan,
    buffers, environments))``, the core's, or ``("error", traceback)`` and the end.
    """
    connection = line.connection
    # What fails is told before schemes are closed, whose ends would say of it only that they have been.
    with closing(connection), _telling_failures(connection), ExitStack() as opened, _telling_failures(connection):
        _serve(line, opened)


@contextmanager
def _telling_failures(connection: Connection) -> Iterator[None]:
    try:
        yield
    except _HungUp:
        return
    except Exception:  # noqa: BLE001  whatever it is, the trainer raises it again with this traceback
        with suppress(ConnectionError):  # unless it has gone: another worker failed first
            connection.send(("error", traceback.format_exc()))


class _HungUp(Exception):
    """The trainer has. Not what an environment raises that has lost a connection of its own: that is a failure."""


@contextmanager
def _with_trainer() -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise _HungUp from error


def _serve(line: Line, opened: ExitStack) -> None:
    with _with_trainer():
        _, (parts, options) = line.connection.recv()
    be_a_worker(options)
    core = Core(parts, options)
    opened.callback(core.close)
    with _with_trainer():
        line.connection.send(("ready", (core.plan, options.buffers, core.num_envs)))
        buffers = line.offer(core.plan, options.buffers)
    core.fill(buffers)
    while True:
        with _with_trainer():
            words = line.connection.recv()
        answer: tuple[str, Any] | None = core.obey(*words)
        if answer is not None:
            with _with_trainer():
                line.connection.send(answer)
                if answer[0] == "batch":
                    line.push(buffers[answer[1]])
