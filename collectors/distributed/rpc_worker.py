"""A worker's side over RPC: takes commands from RPC's threads, and obeys them one after another."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import rpc
from torch.futures import Future

from collectors.distributed.called import CalledCore
from collectors.distributed.calls import Answer
from collectors.distributed.doors import Address
from collectors.distributed.rpc_group import join_group, leave_group
from collectors.workers.worker import WorkerOptions, be_a_worker

_servants: dict[str, Servant] = {}  # by the collector that each serves
_disbanded: set[str] = set()  # collectors that have given up, whose call to enlist may come yet
_enlisting = threading.Lock()  # calls come on several threads


class Servant:
    """Obeys one trainer. RPC's threads may bring commands out of order; they are numbered.

    Args:
        alone: whether this process is nothing but this worker.
    """

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self._core = CalledCore(self._settle)
        self._commands: dict[int, tuple[str, Any, Future[Answer]]] = {}
        self._come = threading.Condition()
        self.life: Future[None] = Future()

    def take(self, number: int, command: str, argument: Any) -> Future[Answer]:
        """Have a command done when it is its turn."""
        reply: Future[Answer] = Future()
        with self._come:
            self._commands[number] = command, argument, reply
            self._come.notify()
        return reply

    def serve(self) -> None:
        """Do commands until one is ``end``."""
        number = 0
        while True:
            command, argument, reply = self._next(number)
            if command == "end":
                self._end(reply)
                return
            reply.set_result(self._core.obey(command, argument))
            number += 1

    def _next(self, number: int) -> tuple[str, Any, Future[Answer]]:
        with self._come:
            self._come.wait_for(lambda: number in self._commands)
            return self._commands.pop(number)

    def _settle(self, options: WorkerOptions) -> None:
        if self._alone:
            be_a_worker(options)

    def _end(self, reply: Future[Answer]) -> None:
        try:
            self._core.close()
            if self._alone:
                # When the trainer leaves the group torch complains, and there is nothing left to say here.
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        finally:  # the trainer, and whoever shuts the group down, wait for both, whatever an environment raises
            reply.set_result(Answer("ended"))
            self.life.set_result(None)


def enlist(token: str) -> None:
    """Called by a trainer in a process of the user's own: a thread of it becomes a worker."""
    with _enlisting:
        if token in _disbanded:
            return
        servant = _servants[token] = Servant(alone=False)
    threading.Thread(target=_serve, args=(token, servant), name="collector-worker", daemon=True).start()


def _serve(token: str, servant: Servant) -> None:
    try:
        servant.serve()
    finally:
        with _enlisting:
            _servants.pop(token, None)


def disband(token: str) -> None:
    """Called by a trainer that has given up before it has told this worker anything, and whether or not it enlisted."""
    with _enlisting:
        _disbanded.add(token)
        servant = _servants.pop(token, None)
    if servant is not None:
        servant.take(0, "end", None)


@rpc.functions.async_execution
def command(token: str, number: int, what: str, argument: Any) -> Future[Answer]:
    """Called by a trainer: see ``Servant.take``."""
    return _servants[token].take(number, what, argument)


@rpc.functions.async_execution
def life(token: str) -> Future[None]:
    """Called by a trainer: returns when the worker ends."""
    return _servants[token].life


def main(line: Connection, worker_idx: int, size: int, address: Address, token: str, timeout: float) -> None:
    """The main function of a process that the trainer has started: it says when it is here, and ends when hung up on.

    RPC is there before any scheme connects.
    """
    servant = _servants[token] = Servant(alone=True)
    line.send("here")
    join_group(f"worker{worker_idx}", worker_idx + 1, size, address, timeout)
    servant.serve()
    with suppress(EOFError, ConnectionError):
        line.recv()
    leave_group()
