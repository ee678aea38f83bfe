"""The worker's side over RPC: takes commands from RPC's threads, and executes them in order."""

from __future__ import annotations

import itertools
import os
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import rpc
from torch.futures import Future

from collectors.distributed.calls import Reply, execute
from collectors.distributed.rpc_group import Address, join_group, leave_group
from collectors.worker import CommandExecutor, configure_process

_services: dict[str, RpcWorkerService] = {}  # by the token of the collector


class RpcWorkerService:
    """Executes the commands of one trainer, in the order of their numbers.

    Attributes:
        lifetime: completed when the worker has ended.
    """

    def __init__(self, *, exclusive: bool) -> None:
        self._exclusive = exclusive
        self._executor = CommandExecutor(configure_process if exclusive else lambda _: None)
        self._commands: dict[int, tuple[str, Any, Future[Reply]]] = {}
        self._arrived = threading.Condition()
        self.lifetime: Future[None] = Future()

    def submit(self, number: int, command: str, argument: Any) -> Future[Reply]:
        """Queue a command; return its reply. Called by RPC's threads."""
        reply: Future[Reply] = Future()
        with self._arrived:
            self._commands[number] = command, argument, reply
            self._arrived.notify()
        return reply

    def run(self) -> None:
        """Execute commands until ``end``. Called once, by the worker's thread."""
        for number in itertools.count():
            with self._arrived:
                self._arrived.wait_for(lambda: number in self._commands)  # noqa: B023
                command, argument, reply = self._commands.pop(number)
            if command == "end":
                break
            reply.set_result(execute(self._executor, command, argument))
        try:
            self._executor.close()
            if self._exclusive:
                # torch logs errors when the trainer leaves the group first; this process has nothing more to log.
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        finally:  # the trainer, and a graceful rpc.shutdown(), wait for both
            reply.set_result(Reply("ended"))
            self.lifetime.set_result(None)


def enlist(token: str) -> None:
    """Start a worker in a thread of this process. Called by the trainer, in a process that a user has started."""
    _services[token] = RpcWorkerService(exclusive=False)
    threading.Thread(target=_serve, args=(token,), name="collector-worker", daemon=True).start()


def _serve(token: str) -> None:
    try:
        _services[token].run()
    finally:
        del _services[token]


@rpc.functions.async_execution
def command(token: str, number: int, name: str, argument: Any) -> Future[Reply]:
    """Call ``RpcWorkerService.submit``. Called by the trainer."""
    return _services[token].submit(number, name, argument)


@rpc.functions.async_execution
def lifetime(token: str) -> Future[None]:
    """Return when the worker has ended. Called by the trainer, which detects the end of this process by it."""
    return _services[token].lifetime


def main(channel: Connection, worker_idx: int, size: int, address: Address, token: str, timeout: float) -> None:
    """Run a worker in a process that the trainer has started.

    The process reports that it has started, joins the group before any scheme connects, and leaves it when a message
    comes by ``channel``, or the trainer has ended.
    """
    service = _services[token] = RpcWorkerService(exclusive=True)
    channel.send("started")
    join_group(f"worker{worker_idx}", worker_idx + 1, size, address, timeout)
    service.run()
    with suppress(EOFError, ConnectionError):
        channel.recv()
    leave_group()
