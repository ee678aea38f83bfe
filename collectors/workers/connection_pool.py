"""Workers with a connection each, in processes that the trainer has started or that have joined it."""

from __future__ import annotations

import secrets
import select
import time
from collections.abc import Collection
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from collectors.worker import serve
from collectors.workers.connections import WorkerConnection
from collectors.workers.pool import RAISED, SHUTDOWN_GRACE, Event, WorkerHandle, WorkerPool, pollable
from collectors.workers.process_handle import ProcessHandle
from collectors.workers.processes import exit_reason, join_or_kill, kill, start
from wsync import NotConnected
from wsync.control import Address, Connection, Kind, Listener, Message, connect


class ConnectedWorker(WorkerHandle):
    """A worker with a connection, once it has made one; commands before that are sent then.

    Args:
        worker_idx: its index.
        key: the payload of its greeting, which no other process has.
        process: the worker's process, if this process has started it.
        liveness: for a worker in another program, a connection without traffic, which ends with its process.
        name: process and host of a worker in another program.
    """

    def __init__(
        self,
        worker_idx: int,
        key: bytes,
        process: BaseProcess | None = None,
        liveness: Connection | None = None,
        name: str = "",
    ) -> None:
        super().__init__(worker_idx)
        self.key, self.process = key, process
        self.connection: WorkerConnection | None = None
        self._liveness, self._name = liveness, name
        self._ended: select.epoll | None = None
        self._commands: list[tuple[str, Any]] = []  # to be sent once there is a connection
        self.arriving: int | None = None  # the buffer of a batch of which a part has been received
        if process is not None:
            self.process_handle = ProcessHandle(process.pid)
        if liveness is not None:
            self._ended = select.epoll()
            for descriptor in liveness.descriptors:  # on one machine also a pidfd: a forked child may hold the socket
                self._ended.register(descriptor, select.EPOLLIN)

    @property
    def sentinel(self) -> int:
        """Readable when the worker has ended."""
        if self.process is not None:
            return self.process.sentinel
        assert self._ended is not None
        return self._ended.fileno()

    def attach(self, connection: WorkerConnection) -> None:
        """Use ``connection`` from now on."""
        self.connection = connection
        commands, self._commands = self._commands, []
        for command, argument in commands:
            self.send(command, argument)

    def send(self, command: str, argument: Any) -> None:
        """Send a command; ``ConnectionPool.poll`` reports a worker that has ended.

        Raises:
            ValueError: the command is too large for one message; only ``build`` may be.
        """
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
            return exit_reason(self.process)
        return f"{self._name} is gone: it was killed, or its machine or the network failed"

    def disconnect(self) -> None:
        """Close the connection, which ends the worker, and the process handle. Idempotent."""
        if self.connection is not None:
            self.connection.close()
        self.process_handle.close()

    def release(self, *, is_shutdown: bool = False) -> None:
        """Close the liveness connection, which ends a worker in another program, with status 0 in a shutdown.

        Idempotent.
        """
        if self._liveness is not None and self._ended is not None:
            if is_shutdown:
                with suppress(OSError):  # closed already, by either side
                    self._liveness.send(Message(Kind.DATA))
            self._ended.close()
            self._liveness.close()


class ConnectionPool(WorkerPool[ConnectedWorker]):
    """Workers with a connection each; waits for connections, messages and the ends of all of them at once.

    Args:
        count: number of workers to start.
        listener: accepts the connections of workers; owned by the pool. By default a Unix socket, over which batches
            are in shared memory.

    Attributes:
        listener: for the workers that are started next.

    Raises:
        OSError: a process could not be started.
    """

    def __init__(self, count: int, listener: Listener | None = None) -> None:
        super().__init__()
        self.listener = listener or Listener()
        try:
            for i in range(count):
                self.start_worker(i)
        except BaseException:  # also Ctrl-C: the workers that have been started are ended
            self.close()
            raise

    def start_worker(self, worker_idx: int) -> ConnectedWorker:
        """See WorkerPool."""
        key = secrets.token_hex(16).encode()
        process = start(_main, worker_idx, self.listener.address, worker_idx, key)
        worker = ConnectedWorker(worker_idx, key, process)
        self.workers.append(worker)
        return worker

    def send(self, worker: ConnectedWorker, command: str, argument: Any = None) -> None:
        """See WorkerPool."""
        worker.send(command, argument)

    def poll(self, workers: Collection[ConnectedWorker], wakeup_fd: int, timeout: float | None) -> list[Event]:
        """See WorkerPool."""
        poller = select.poll()  # one sixth of the time of multiprocessing.connection.wait
        poller.register(wakeup_fd, select.POLLIN)
        for worker in workers:
            poller.register(worker.sentinel, select.POLLIN)
            poller.register(self.listener if worker.connection is None else worker.connection, select.POLLIN)
        seconds = pollable(timeout)
        ready = {descriptor for descriptor, _ in poller.poll(None if seconds is None else seconds * 1e3)}
        events: list[Event] = []
        if self.listener.fileno() in ready:
            waiting = [worker for worker in workers if worker.connection is None]
            self._accept()
            events += [Event(worker, "accepted") for worker in waiting if worker.connection is not None]
        for worker in workers:
            readable = worker.connection is not None and worker.connection.fileno() in ready
            if readable or worker.sentinel in ready:
                events.append(Event(worker, *self._receive(worker, readable)))
        return events

    def _accept(self) -> None:
        """Accept one connection, if there is one."""
        if (accepted := self.listener.accept()) is not None:
            self._register(*accepted)

    def _register(self, connection: Connection, greeting: Message) -> None:
        """Give a connection to the worker that has made it; close one of a worker that was discarded meanwhile."""
        for worker in self.workers:
            if worker.connection is None and worker.key == greeting.payload:
                self._attach(worker, connection)
                return
        connection.close()

    def _attach(self, worker: ConnectedWorker, connection: Connection) -> None:
        worker.attach(WorkerConnection(connection))

    def _receive(self, worker: ConnectedWorker, readable: bool) -> tuple[str, Any]:
        """Receive a message; messages that a worker has sent before it ended come before its end."""
        connection = worker.connection
        try:
            # Of a worker that has ended, the last message may still be on its way over TCP. The end of the stream may
            # never come: a forked child may hold the socket.
            patience = 0.0 if connection is not None and connection.shares_memory else SHUTDOWN_GRACE
            if connection is None or not (readable or wait([connection.fileno()], patience)):
                return "died", worker.exit_reason()
            arriving: Any = worker.arriving
            kind, value, fds = connection.receive() if arriving is None else ("batch", arriving, ())
            if kind == "ready":
                layout, count, num_envs = value
                worker.set_ready(layout, connection.open_buffers(layout, count, fds), num_envs)
            elif kind == "batch":
                complete = connection.receive_batch(worker.buffers[value])
                worker.arriving = None if complete else value
                kind = "batch" if complete else "part"
            elif kind in RAISED:
                wait([worker.sentinel], SHUTDOWN_GRACE)  # the worker closes its environments after the message
        except (EOFError, OSError):
            return "died", worker.exit_reason()
        return kind, value

    def discard(self, worker: ConnectedWorker) -> None:
        """See WorkerPool. A worker in another program ends when it notices."""
        self.workers.remove(worker)
        worker.disconnect()
        if worker.process is not None:
            kill(worker.process)
        worker.release()

    def close(self) -> None:
        """See WorkerPool."""
        self.listener.close()
        for worker in self.workers:
            worker.disconnect()
        deadline = time.monotonic() + SHUTDOWN_GRACE
        try:
            for worker in self.workers:
                if worker.process is None:
                    wait([worker.sentinel], max(0.0, deadline - time.monotonic()))
            join_or_kill([worker.process for worker in self.workers if worker.process is not None])
        finally:  # after Ctrl-C all processes have been killed: another call must not wait for them again
            for worker in self.workers:
                worker.release(is_shutdown=True)
            self.workers = []


def _main(address: Address, worker_idx: int, key: bytes) -> None:
    """Run a worker in a process that the trainer has started."""
    try:
        connection = connect(address, worker_idx, None, key)
    except NotConnected:
        return  # the trainer has shut down meanwhile
    serve(WorkerConnection(connection))
