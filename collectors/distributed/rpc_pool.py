"""The trainer's side of workers that it reaches by RPC: those that it starts itself, or the user's."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from torch.distributed import rpc
from torch.futures import Future

from collectors.distributed import rpc_worker
from collectors.distributed.calls import Answer, CalledWorker, CallPool, WakeEvent
from collectors.distributed.rpc_group import host_store, is_member, join_or_end, leave_group
from collectors.workers.hold import Hold
from collectors.workers.pool import GRACE
from collectors.workers.processes import end, end_of, kill, pipe, start
from wsync import SyncTimeout, WorkerDied

_TOO_LATE = "RPCErr:1:"  # how torch begins the message of a call that has timed out


class RpcWorker(CalledWorker):
    """A member of the RPC group.

    Args:
        worker_idx: its index.
        name: in the group.
        token: of the collector that it works for.
    """

    def __init__(self, worker_idx: int, name: str, token: str) -> None:
        super().__init__(worker_idx)
        self.name = name
        self._token = token
        self._number = 0

    @abstractmethod
    def close(self) -> None:
        """Let go of what this end has of it."""

    def call(self, command: str, argument: Any, answered: Callable[[Answer], None]) -> None:
        """See CalledWorker."""

        def on_done(future: Future[Answer]) -> None:
            try:
                answer = future.value()
            except Exception as error:  # noqa: BLE001  what the call raised is an answer: this is the way to it
                answer = Answer("died", _first_line(error))
            answered(answer)

        number, self._number = self._number, self._number + 1
        try:
            rpc.rpc_async(
                self.name, rpc_worker.command, args=(self._token, number, command, argument), timeout=0
            ).add_done_callback(on_done)
        except RuntimeError as error:
            answered(Answer("died", _first_line(error)))


def _raise_for(failed: Mapping[int, RuntimeError], names: Sequence[str], timeout: float) -> NoReturn:
    late = f"did not answer within {timeout:g} s"
    causes = {i: late if _TOO_LATE in str(error) else _first_line(error) for i, error in failed.items()}
    lines = [f"worker {i} ('{names[i]}' of the RPC group): {cause}" for i, cause in causes.items()]
    kind = SyncTimeout if all(cause is late for cause in causes.values()) else WorkerDied
    raise kind("\n".join(lines), causes) from next(iter(failed.values()))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


class OwnRpcWorker(RpcWorker):
    """A worker in a process that the trainer has started."""

    def __init__(self, worker_idx: int, token: str, process: BaseProcess, line: Connection) -> None:
        super().__init__(worker_idx, f"worker{worker_idx}", token)
        self.process = process
        self.line = line
        self.hold = Hold(process.pid)

    @property
    def sentinel(self) -> int:
        """Readable when the process has ended."""
        return self.process.sentinel

    def last_words(self, error: str) -> str:
        """See CalledWorker."""
        if wait([self.process.sentinel], GRACE):
            return end_of(self.process)
        return f"(process {self.process.pid}) cannot be reached any more: {error}"

    def close(self) -> None:
        """See RpcWorker."""
        self.line.close()
        self.hold.close()


class UsersRpcWorker(RpcWorker):
    """A worker in a process that somebody else has started; a call that does not return watches over it."""

    def __init__(self, worker_idx: int, name: str, token: str) -> None:
        super().__init__(worker_idx, name, token)
        self._end = WakeEvent()
        rpc.rpc_async(name, rpc_worker.life, args=(token,), timeout=0).add_done_callback(lambda _: self._end.set())

    @property
    def sentinel(self) -> int:
        """Readable when the worker or its process has ended."""
        return self._end.fileno()

    def last_words(self, error: str) -> str:
        """See CalledWorker."""
        return f"('{self.name}' of the RPC group) cannot be reached any more: {error}"

    def close(self) -> None:
        """See RpcWorker."""
        self._end.close()


class RpcPool(CallPool[RpcWorker]):
    """Workers of an RPC group.

    Args:
        count: how many.
        names: of members of a group that this process belongs to; None starts workers, and a group of theirs.
        host: the interface of that group.
        timeout: seconds in which they have to be there.

    Raises:
        WorkerDied: one ended before it had joined, or cannot be reached.
        SyncTimeout: the group was not complete in time, or a member did not answer.
        NotConnected: this machine cannot listen on ``host``.
        RuntimeError: there is a group already, and no names; or names, and no group.
        ValueError: another number of names, or one twice.
    """

    def __init__(self, count: int, *, names: Sequence[str] | None, host: str, timeout: float) -> None:
        super().__init__()
        self._token = secrets.token_hex(8)
        self._store: Any = None
        self._joined = False
        if names is None and is_member():
            raise RuntimeError(
                "this process belongs to an RPC group already: give the names of its workers (workers=[…]), "
                "or shut the other collector down (rpc.shutdown() ends a group of your own)"
            )
        try:
            if names is None:
                self._start(count, host, timeout)
            else:
                self._enlist(count, names, timeout)
        except BaseException:
            self.close()
            raise

    def _enlist(self, count: int, names: Sequence[str], timeout: float) -> None:
        if not is_member():
            raise RuntimeError("workers=[…] are names in an RPC group: call torch.distributed.rpc.init_rpc() first")
        if len(names) != count:
            raise ValueError(f"{len(names)} names of workers for {count} environment functions")
        if len(set(names)) < count:
            raise ValueError(f"a process can be one worker, and names has one twice: {', '.join(names)}")
        calls: dict[int, Future[None]] = {}
        failed: dict[int, RuntimeError] = {}
        try:
            for i, name in enumerate(names):  # one deadline for all
                calls[i] = rpc.rpc_async(name, rpc_worker.enlist, args=(self._token,), timeout=timeout)
            for i, call in calls.items():
                try:
                    call.wait()
                    self.workers.append(UsersRpcWorker(i, names[i], self._token))
                except RuntimeError as error:
                    failed[i] = error
        finally:
            for i in calls.keys() - {worker.worker_idx for worker in self.workers}:
                rpc.rpc_async(names[i], rpc_worker.disband, args=(self._token,))  # it may have heard, or hear it later
        if failed:
            _raise_for(failed, names, timeout)

    def _start(self, count: int, host: str, timeout: float) -> None:
        self._store, address = host_store(host)
        deadline = time.monotonic() + timeout
        for i in range(count):
            mine, theirs = pipe()
            process = start(rpc_worker.main, i, theirs, i, count + 1, address, self._token, timeout)
            theirs.close()
            self.workers.append(OwnRpcWorker(i, self._token, process, mine))
        own = [worker for worker in self.workers if isinstance(worker, OwnRpcWorker)]
        for worker in own:
            if not worker.line.poll(max(0.0, deadline - time.monotonic())):
                raise SyncTimeout(
                    f"worker {worker.worker_idx} was not there after {timeout:g} s",
                    {worker.worker_idx: "never joined"},
                )
        dead = join_or_end(count + 1, address, [worker.sentinel for worker in own], timeout)
        for worker in own:
            if worker.sentinel == dead:
                cause = f"{end_of(worker.process)}, before it had joined"
                raise WorkerDied(f"worker {worker.worker_idx} {cause}", {worker.worker_idx: cause})
        self._joined = True

    def let_go(self, worker: RpcWorker) -> None:
        """See Pool. Somebody else's process goes on, and the worker in it ends when it hears of that."""
        self.workers.remove(worker)
        if isinstance(worker, OwnRpcWorker):
            kill(worker.process)
        else:  # or its thread, and the call that watches over it, would keep a graceful rpc.shutdown() waiting for ever
            worker.call("end", None, lambda answer: None)
        worker.close()

    def close(self) -> None:
        """See Pool."""
        if self._joined or not isinstance(next(iter(self.workers), None), OwnRpcWorker):
            self._end_work()
        if self._joined:
            leave_group()  # the trainer first: who is left alone complains
            self._joined = False
        for worker in self.workers:
            worker.close()
        end([worker.process for worker in self.workers if isinstance(worker, OwnRpcWorker)])
        self.workers, self._store = [], None
        self._some.close()
