"""The trainer's workers, whatever has started them: send commands, wait for events, end workers."""

from __future__ import annotations

import io
import os
import secrets
import select
import sys
import time
from collections.abc import Collection
from contextlib import closing, suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from collectors.batches import BatchLayout
from collectors.worker import serve
from collectors.workers import processes
from collectors.workers.connections import Connection, Listener, connect, milliseconds
from wsync import NotConnected, SyncTimeout, WorkerDied
from wsync.control import Address, readable


class WakeEvent(io.FileIO):
    """A descriptor that any thread, or a signal handler, makes readable; after ``close``, ``set`` does nothing."""

    def __init__(self) -> None:
        super().__init__(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), "r+")

    def set(self) -> None:
        """Make it readable."""
        with suppress(ValueError):  # it is closed
            self.write((1).to_bytes(8, sys.byteorder))

    def clear(self) -> None:
        """Make it not readable."""
        with suppress(ValueError):
            self.read(8)

    __del__ = io.FileIO.close  # without a warning


class Event(NamedTuple):
    """What a worker reports.

    Attributes:
        worker: the worker.
        kind: ``ready``, ``found``, ``connected`` or ``batch``: the answer to a command; ``error``: the worker raised,
            and ends; ``accepted``: its connection was accepted; ``died``: it, or its connection, ended without a
            message.
        value: the buffer's index for ``batch``, the object for ``found``; else a traceback or a reason.
    """

    worker: WorkerHandle
    kind: str
    value: Any = None


class WorkerHandle:
    """One worker, seen from the trainer; a ``wsync.RemoteWorker``. Commands are kept until it has a connection.

    Attributes:
        process: the worker's process, if this process has started it.
        name: of a worker in another program, for messages.
        key: what it greets with; empty if any worker may have this index.
        gave_up: set when a worker in another program has ended before it had a connection.
        num_envs: number of its environments; 0 until it is ready.
        buffers: memory of its batches, one ``uint8`` tensor each.
        batches: views of ``buffers``. A batch is overwritten after the next ``collect`` command for its buffer.
    """

    def __init__(self, worker_idx: int, key: bytes, process: BaseProcess | None = None, name: str = "") -> None:
        self.worker_idx, self.key, self.process, self.name = worker_idx, key, process, name
        self.connection: Connection | None = None
        self.gave_up = WakeEvent()
        self.num_envs = 0
        self.buffers: list[torch.Tensor] = []
        self.batches: list[TensorDict] = []
        self._commands: list[tuple[str, Any]] = []  # to be sent once there is a connection

    @property
    def sentinel(self) -> int:
        """Readable when the worker has ended."""
        if self.process is not None:
            return self.process.sentinel
        return self.gave_up.fileno() if self.connection is None else self.connection.sentinel

    def fileno(self) -> int:
        """Return ``sentinel``: a scheme takes this object in place of a process."""
        return self.sentinel

    def set_ready(self, layout: BatchLayout, count: int, num_envs: int, memory: str | None) -> None:
        """Store what the worker reports when its environments are built; ``memory`` is that of its own buffers."""
        self.num_envs = num_envs
        self.buffers = layout.buffers(count, memory)
        self.batches = [layout.view(buffer) for buffer in self.buffers]

    def attach(self, connection: Connection) -> None:
        """Use ``connection`` from now on."""
        self.connection = connection
        commands, self._commands = self._commands, []
        for command, argument in commands:
            self.send(command, argument)

    def send(self, command: str, argument: Any = None) -> None:
        """Send a command; of a worker that has ended, ``WorkerPool.poll`` says so."""
        if self.connection is None:
            self._commands.append((command, argument))
            return
        try:
            self.connection.send(command, argument)
        except ConnectionError:
            return
        except ValueError as error:
            raise ValueError(
                f"the policy (with create_env_fn) is too large to be sent to a worker ({len(argument[0])} bytes, "
                "1 GiB at most): give a policy_factory"
            ) from error

    def exit_reason(self) -> str:
        """Return how the worker has ended, as text to follow "worker 3 "; wait for the end of its process."""
        if self.process is not None:
            return processes.exit_reason(self.process)
        return f"{self.name} is gone: it was killed, or its machine or the network failed"

    def close(self) -> None:
        """Close the connection, which ends the worker. Idempotent."""
        if self.connection is not None:
            self.connection.close()
        self.gave_up.close()


class WorkerPool:
    """Workers with a connection each; waits for connections, messages and the ends of all of them at once.

    The first command for each worker is ``build``. A worker executes its commands in order; each has one answer, except
    ``seed`` and ``resume``, which have none. The thread that calls holds the ``WorkerGroup``'s lock.

    Args:
        count: number of workers.
        listener: accepts their connections; by default a Unix socket, over which batches are in shared memory.
        start: whether to start them, by ``start_worker``.
    """

    def __init__(self, count: int, listener: Listener | None = None, *, start: bool = True) -> None:
        self.workers: list[WorkerHandle] = []
        self.listener, self._count = listener or Listener(), count
        try:
            for i in range(count if start else 0):
                self.start_worker(i)
        except BaseException:  # also Ctrl-C: the workers that have been started are ended
            self.close()
            raise

    def start_worker(self, worker_idx: int) -> WorkerHandle:
        """Start a worker, in place of a discarded one, without waiting for it; OSError: that is not possible."""
        key = secrets.token_hex(16).encode()
        self.workers.append(worker := WorkerHandle(worker_idx, key, self.start_process(worker_idx, key)))
        return worker

    def start_process(self, worker_idx: int, key: bytes) -> BaseProcess:
        """Start a process that connects to ``listener`` with ``key``."""
        return processes.start(work, worker_idx, self.listener.address, worker_idx, key)

    def poll(self, workers: Collection[WorkerHandle], wakeup_fd: int, timeout: float | None) -> list[Event]:
        """Wait for events, for ``wakeup_fd``, or for ``timeout`` seconds; a message comes before its sender's end."""
        poller = select.poll()  # one sixth of the time of multiprocessing.connection.wait
        poller.register(wakeup_fd, select.POLLIN)
        for worker in workers:
            poller.register(worker.sentinel, select.POLLIN)
            poller.register(self.listener if worker.connection is None else worker.connection, select.POLLIN)
        ready = {descriptor for descriptor, _ in poller.poll(None if timeout is None else milliseconds(timeout))}
        events: list[Event] = []
        if self.listener.fileno() in ready and (accepted := self.listener.accept_worker()) is not None:
            waiting = [worker for worker in workers if worker.connection is None]
            self._register(*accepted)
            events += [Event(worker, "accepted") for worker in waiting if worker.connection is not None]
        for worker in workers:
            has_message = worker.connection is not None and worker.connection.fileno() in ready
            if has_message or worker.sentinel in ready:
                events.append(Event(worker, *self._receive(worker, has_message)))
        return events

    def wait_for_workers(self, timeout: float) -> None:
        """Wait until all workers have connected; SyncTimeout or WorkerDied names one that has not."""
        deadline = time.monotonic() + timeout
        while missing := self._missing():
            starting = {worker.sentinel: worker for worker in self.workers if worker.connection is None}
            left = deadline - time.monotonic()
            ready = wait([self.listener.fileno(), *starting], milliseconds(left) / 1e3)
            if not ready or left <= 0:  # foreign connections may keep the listener readable
                listed = ", ".join(map(str, missing))
                raise SyncTimeout(
                    f"worker(s) {listed} {self._why_late(timeout)}", dict.fromkeys(missing, "never joined")
                )
            if (accepted := self.listener.accept_worker()) is not None:
                self._register(*accepted)
            for worker in (starting[fd] for fd in ready if isinstance(fd, int) and fd in starting):
                if worker.connection is None:
                    index, cause = worker.worker_idx, f"{worker.exit_reason()}, before it had joined"
                    raise WorkerDied(f"worker {index} {cause}", {index: cause})
        self.workers.sort(key=lambda worker: worker.worker_idx)

    def _missing(self) -> list[int]:
        joined = {worker.worker_idx for worker in self.workers if worker.connection is not None}
        return sorted(set(range(self._count)) - joined)

    def _why_late(self, timeout: float) -> str:
        return f"did not join within {timeout:g} s"

    def _register(self, connection: Connection, worker_idx: int, name: bytes) -> None:
        """Give a connection to the worker that has made it; close one of a worker that was discarded meanwhile."""
        for worker in self.workers:
            if worker.connection is None and worker.key == name:
                worker.attach(connection)
                return
        connection.close()

    def _receive(self, worker: WorkerHandle, has_message: bool) -> tuple[str, Any]:
        """Receive a message; return an event's kind and value."""
        connection = worker.connection
        if connection is None:
            return "died", worker.exit_reason()
        # Of a worker that has ended, the last message may still be on its way over TCP. The end of the stream may
        # never come: a forked child may hold the socket.
        patience = 0.0 if connection.shares_memory else processes.SHUTDOWN_GRACE
        try:
            if not (has_message or readable([connection.fileno()], time.monotonic() + patience)):
                return "died", worker.exit_reason()
            kind, value = connection.receive()
            if kind == "ready":
                worker.set_ready(*value)
            elif kind == "batch":
                value, data = value
                if data:
                    worker.buffers[value].numpy().data[:] = data
            elif kind == "error":
                wait([worker.sentinel], processes.SHUTDOWN_GRACE)  # it closes its environments after the message
        except OSError:
            return "died", worker.exit_reason()
        return kind, value

    def discard(self, worker: WorkerHandle) -> None:
        """End a worker at once: kill its process; one in another program ends when it notices."""
        self.workers.remove(worker)
        worker.close()
        if worker.process is not None:
            processes.kill(worker.process)

    def close(self) -> None:
        """Tell all workers to end, and wait for that. Those in other programs end as their connections are closed."""
        self.listener.close()
        workers, self.workers = self.workers, []  # after Ctrl-C, another call does not wait for killed processes again
        started = [worker.process for worker in workers if worker.process is not None]
        for worker in workers:
            worker.send("end")
            if worker.process is not None:
                worker.close()
        try:
            processes.join_or_kill(started)
            deadline = time.monotonic() + processes.SHUTDOWN_GRACE
            for worker in workers:
                if worker.process is None:
                    wait([worker.sentinel], max(0.0, deadline - time.monotonic()))
        finally:
            for worker in workers:
                worker.close()


def work(address: Address, worker_idx: int, key: bytes) -> None:
    """Connect to the trainer, and execute its commands until it ends the worker."""
    try:
        connection = connect(address, worker_idx, key)
    except NotConnected:
        return  # the trainer has shut down meanwhile
    with closing(connection):
        serve(connection)
