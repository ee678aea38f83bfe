"""The trainer's side of workers that it reaches over TCP, started by itself or by others."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from collectors.distributed import torchrun
from collectors.distributed.doors import Door, Visitor
from collectors.distributed.tcp_worker import join, own_key
from collectors.workers.hold import Hold
from collectors.workers.line_pool import LinePool, LineWorker
from collectors.workers.lines import StreamLine, serve
from collectors.workers.pool import GRACE
from collectors.workers.processes import ProcessWorker, end, end_of, kill, start, start_worker
from wsync import SyncTimeout, WorkerDied

Launcher = Literal["local", "join"]
_log = logging.getLogger(__name__)


def default_host(launcher: Launcher) -> str:
    """Where to listen: for this machine alone, or on the interface that torchrun's other nodes know."""
    return torchrun.trainers_host() if launcher == "join" and torchrun.under_torchrun() else "127.0.0.1"


class TcpWorker(LineWorker):
    """A worker that has joined.

    Args:
        worker_idx: its index.
        line: to it.
        life: ends when it does.
        pid: of its process, if that was started here.
        last_words: see LineWorker.
    """

    def __init__(
        self, worker_idx: int, line: StreamLine, life: Connection, pid: int | None, last_words: Callable[[], str]
    ) -> None:
        super().__init__(worker_idx, line)
        self.hold = Hold(pid)
        self.life = life
        self._last_words = last_words

    @property
    def sentinel(self) -> int:
        """Readable when the worker has ended."""
        return self.life.fileno()

    def last_words(self) -> str:
        """See LineWorker."""
        return self._last_words()


class TcpPool(LinePool[LineWorker]):
    """Waits until so many workers have joined; then nobody listens any more.

    Who takes the place of one that was started here needs no door: its line is a pipe, with the same words and bytes.

    Args:
        count: how many.
        host: the interface to listen on.
        port: 0 for any that is free.
        launcher: ``"local"`` starts them on this machine, ``"join"`` lets others start them.
        timeout: seconds in which they have to join.

    Raises:
        SyncTimeout: somebody did not join; says who.
        WorkerDied: one that was started here ended before it had joined.
        ValueError: workers that torchrun has not started, or no key.
        NotConnected: it cannot listen there.
    """

    def __init__(self, count: int, *, host: str, port: int, launcher: Launcher, timeout: float) -> None:
        super().__init__()
        self._count = count
        self._processes: dict[int, BaseProcess] = {}
        self._met: dict[bytes, dict[str, Visitor]] = {}
        torchruns = launcher == "join" and torchrun.under_torchrun()
        authkey = secrets.token_bytes(32) if launcher == "local" or torchruns else own_key(os.environ)
        if torchruns and torchrun.world_size() != count + 1:
            raise ValueError(
                f"torchrun has started {torchrun.world_size()} processes: a trainer and "
                f"{torchrun.world_size() - 1} workers, not {count}; set num_workers to that"
            )
        door = Door(host, port, authkey)
        kept: Any = None
        try:
            if torchruns:
                kept = torchrun.publish(door.address, authkey, timeout)
            elif launcher == "local":
                for i in range(count):
                    self._processes[i] = start(join, i, door.address, authkey, i, timeout)
            else:
                _log.info("waiting at %s:%d for %d workers to join", *door.address, count)
            self._gather_in(door, timeout)
        except BaseException:
            self.close()
            raise
        finally:
            del kept
            door.close()

    def _gather_in(self, door: Door, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        joined: dict[int, TcpWorker] = {}
        while len(joined) < self._count:
            starting = {process.sentinel: i for i, process in self._processes.items() if i not in joined}
            left = deadline - time.monotonic()
            ready = wait([*door.signs, *starting], max(0.0, left))
            if not ready or left <= 0:  # strangers may be at the door all the time
                missing = sorted(set(range(self._count)) - joined.keys())
                raise SyncTimeout(
                    f"worker(s) {', '.join(map(str, missing))} did not join within {timeout:g} s",
                    {i: "never joined" for i in missing},
                )
            for visitor in door.admit():
                self._meet(visitor, joined)
            self.workers = [joined[i] for i in sorted(joined)]
            for i in [starting[fd] for fd in ready if isinstance(fd, int) and fd in starting]:
                if i not in joined:
                    raise WorkerDied(f"worker {i} {end_of(self._processes[i])}, before it had joined", {i: "died"})

    def _meet(self, visitor: Visitor, joined: dict[int, TcpWorker]) -> None:
        """Let one visitor in; a worker has joined with its second connection."""
        hello = visitor[1]
        both = self._met.setdefault(hello.pair, {})
        both[hello.purpose] = visitor
        if len(both) < 2:
            return
        del self._met[hello.pair]
        (line, _), (life, _) = both["line"], both["life"]
        free = [i for i in range(self._count) if i not in joined]
        index = free[0] if hello.worker_idx == -1 else hello.worker_idx
        if index not in free:
            line.send(("refused", f"there is a worker {index} already, or there are only {self._count}"))
            line.close()
            life.close()
            return
        line.send(("welcome", index))
        gone = f"{hello.name} is gone: it was killed, or its machine or the network failed"
        own = self._processes.get(index)
        pid, last_words = (own.pid, partial(end_of, own)) if own else (None, lambda: gone)
        joined[index] = TcpWorker(index, StreamLine(line), life, pid, last_words)

    def begin(self, worker_idx: int) -> LineWorker:
        """See Pool."""
        worker = start_worker(_serve, worker_idx, StreamLine)
        self.workers.append(worker)
        return worker

    def let_go(self, worker: LineWorker) -> None:
        """See Pool. A process that somebody else has started ends when it notices."""
        self.workers.remove(worker)
        if isinstance(worker, ProcessWorker):
            worker.end()
            return
        worker.line.connection.close()
        worker.hold.close()
        process = self._processes.pop(worker.worker_idx, None)
        if process is not None:
            kill(process)
        if isinstance(worker, TcpWorker):
            worker.life.close()

    def close(self) -> None:
        """See Pool."""
        for worker in self.workers:
            worker.line.connection.close()
            worker.hold.close()
        deadline = time.monotonic() + GRACE
        for worker in self.workers:
            wait([worker.sentinel], max(0.0, deadline - time.monotonic()))
        own = [worker.process for worker in self.workers if isinstance(worker, ProcessWorker)]
        end([*self._processes.values(), *own])
        for worker in self.workers:
            if isinstance(worker, TcpWorker):
                worker.life.close()  # the end of one that has not ended by now
        for half in self._met.values():
            for connection, _ in half.values():
                connection.close()
        self.workers, self._processes, self._met = [], {}, {}


def _serve(connection: Connection) -> None:
    serve(StreamLine(connection))
