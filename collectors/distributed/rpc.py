"""The collector that calls its workers by ``torch.distributed.rpc``."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from torch.distributed import rpc
from torch.futures import Future

from collectors.arguments import EnvMaker
from collectors.distributed import rpc_worker
from collectors.distributed.calls import CalledWorker, CallPool, Reply
from collectors.distributed.rpc_group import host_store, is_member, join_or_end, leave_group
from collectors.worker_collector import WorkerCollector
from collectors.workers.connections import milliseconds
from collectors.workers.processes import SHUTDOWN_GRACE, exit_reason, join_or_kill, kill, pipe, start
from wsync import SyncTimeout, WorkerDied

_TIMED_OUT = "RPCErr:1:"  # prefix of torch's message for a call that has timed out


class RPCCollector(WorkerCollector):
    """Collects batches with workers that are called by RPC (TensorPipe).

    By default it starts its workers itself, on this machine, and a group in which the trainer is ``"trainer"`` and they
    are ``"worker0"``, ``"worker1"`` …; both end with it. Or it uses members of a group that this process has joined by
    ``init_rpc``; those stay in it afterwards.

    Args:
        create_env_fn: one function per worker; each makes an environment (lambdas work).
        policy: see ``WorkerCollector``.
        sync: whether a batch has a share of every worker, and all wait for new weights; otherwise it is one worker's.
        workers: names in the group of this process, one per worker. ``threads`` has no effect on them.
        host: the interface of a group that is started, and the one on which the default scheme listens; give it with
            ``workers`` if they are on other machines. Unless ``TP_SOCKET_IFNAME`` is set, a loopback address keeps all
            of the group's traffic on the loopback interface.
        timeout: seconds in which the workers have to join.
        options: see ``WorkerCollector``.

    Raises:
        RuntimeError: there is a group already and no ``workers``, or ``workers`` and no group.
        wsync.SyncTimeout: a worker did not join in time.
        wsync.NotConnected: it cannot listen on ``host``, or that would be on every interface.
        ValueError: ``on_worker_failure="restart"``.
        Exception: else as ``WorkerCollector``.
    """

    def __init__(
        self,
        create_env_fn: EnvMaker | Sequence[EnvMaker],
        policy: Any = None,
        *,
        sync: bool = True,
        workers: Sequence[str] | None = None,
        host: str = "127.0.0.1",
        timeout: float = 60.0,
        **options: Any,
    ) -> None:
        self._refuse_restart(
            options,
            "torch.distributed.rpc does not take a member back into a group, nor lets this process have two: "
            "use on_worker_failure=drop, or a DistributedCollector (weight_sync=distributed)",
        )
        self._host = host
        start = partial(RpcPool, names=workers, host=host, timeout=timeout)
        super().__init__(create_env_fn, policy, sync=sync, start=start, **options)


class RpcWorker(CalledWorker):
    """A member of the RPC group."""

    def __init__(
        self,
        worker_idx: int,
        name: str,
        token: str,
        process: BaseProcess | None = None,
        channel: Connection | None = None,
    ) -> None:
        super().__init__(worker_idx)
        self.name, self.process, self._channel = name, process, channel
        self._token = token
        self._numbers = itertools.count()
        if process is None:
            call = rpc.rpc_async(name, rpc_worker.lifetime, args=(token,), timeout=0)
            call.add_done_callback(lambda _: self._ended.set())

    @property
    def sentinel(self) -> int:
        """Readable when the worker or its process has ended."""
        return super().sentinel if self.process is None else self.process.sentinel

    def call(self, command: str, argument: Any, on_reply: Callable[[Reply], None]) -> None:
        """Call the member; RPC's threads may deliver calls out of order, so they are numbered."""

        def on_done(future: Future[Reply]) -> None:
            try:
                reply = future.value()
            except Exception as error:  # noqa: BLE001  the error of a call is its reply; it reaches the trainer as such
                reply = Reply("died", _first_line(error))
            on_reply(reply)

        arguments = (self._token, next(self._numbers), command, argument)
        try:
            rpc.rpc_async(self.name, rpc_worker.command, args=arguments, timeout=0).add_done_callback(on_done)
        except RuntimeError as error:
            on_reply(Reply("died", _first_line(error)))

    def exit_reason(self, error: str) -> str:
        """Return how the worker has ended, as text to follow "worker 3 ", after a call has raised ``error``."""
        if self.process is not None and wait([self.process.sentinel], SHUTDOWN_GRACE):
            return exit_reason(self.process)
        which = f"'{self.name}' of the RPC group" if self.process is None else f"process {self.process.pid}"
        return f"({which}) cannot be reached any more: {error}"

    def close(self) -> None:
        """Let the process end, and release the resources of this end."""
        if self._channel is not None:
            with suppress(OSError):  # the process has ended, or this end is closed
                self._channel.send(None)  # a message: a forked child of this process may hold this end open
            self._channel.close()
        super().close()


class RpcPool(CallPool[RpcWorker]):
    """Workers of an RPC group."""

    def __init__(self, count: int, *, names: Sequence[str] | None, host: str, timeout: float) -> None:
        if names is None and is_member():
            raise RuntimeError(
                "this process belongs to an RPC group already: give the names of its workers (workers=[…]), "
                "or shut the other collector down (rpc.shutdown() ends a group of your own)"
            )
        super().__init__()
        self._token = secrets.token_hex(8)
        self._store: Any = None
        self._joined = False
        try:
            if names is None:
                self._start_group(count, host, timeout)
            else:
                self._enlist(count, names, timeout)
        except BaseException:  # also Ctrl-C: a group that has begun to form is left
            self.close()
            raise

    def _enlist(self, count: int, names: Sequence[str], timeout: float) -> None:
        if not is_member():
            raise RuntimeError("workers=[…] are names in an RPC group: call torch.distributed.rpc.init_rpc() first")
        if len(names) != count:
            raise ValueError(f"{len(names)} names of workers for {count} environment functions")
        if len(set(names)) < count:
            raise ValueError(f"a process can be one worker, and names has one twice: {', '.join(names)}")
        # All at once, with one deadline.
        calls = [rpc.rpc_async(name, rpc_worker.enlist, args=(self._token,), timeout=timeout) for name in names]
        failed: dict[int, RuntimeError] = {}
        for i, call in enumerate(calls):
            try:
                call.wait()
                self.workers.append(RpcWorker(i, names[i], self._token))
            except RuntimeError as error:
                failed[i] = error
        if failed:
            _raise_for(failed, names, timeout)

    def _start_group(self, count: int, host: str, timeout: float) -> None:
        self._store, address = host_store(host)
        timeout = milliseconds(timeout) / 1e3  # torch's RPC, too, counts milliseconds in an int
        deadline = time.monotonic() + timeout
        channels: list[Connection] = []
        for i in range(count):
            mine, theirs = pipe()
            process = start(rpc_worker.main, i, theirs, i, count + 1, address, self._token, timeout)
            theirs.close()
            channels.append(mine)
            self.workers.append(RpcWorker(i, f"worker{i}", self._token, process, mine))
        for i, channel in enumerate(channels):
            if not channel.poll(max(0.0, deadline - time.monotonic())):
                raise SyncTimeout(f"worker {i} did not start within {timeout:g} s", {i: "never joined"})
        dead = join_or_end(count + 1, address, [worker.sentinel for worker in self.workers], timeout)
        for worker in self.workers:
            if worker.process is not None and worker.sentinel == dead:
                cause = f"{exit_reason(worker.process)}, before it had joined"
                raise WorkerDied(f"worker {worker.worker_idx} {cause}", {worker.worker_idx: cause})
        self._joined = True

    def discard(self, worker: RpcWorker) -> None:
        """Kill a process that was started; a user's process continues, and its worker ends when the call arrives."""
        self.workers.remove(worker)
        if worker.process is not None:
            kill(worker.process)
        else:  # otherwise the open ``lifetime`` call would block a graceful rpc.shutdown() for ever
            worker.call("end", None, lambda _: None)
        worker.close()

    def close(self) -> None:
        """End the workers, and a group that was started for them."""
        if self._joined or all(worker.process is None for worker in self.workers):
            self._end_workers()
        if self._joined:
            leave_group()  # before the workers: torch logs errors in the member that is left alone
            self._joined = False
        for worker in self.workers:
            worker.close()
        workers, self.workers = self.workers, []  # after Ctrl-C, another call must not wait for killed processes again
        try:
            join_or_kill([worker.process for worker in workers if worker.process is not None])
        finally:
            self._store = None
            self._replied.close()


def _raise_for(failed: Mapping[int, RuntimeError], names: Sequence[str], timeout: float) -> NoReturn:
    late = f"did not answer within {timeout:g} s"
    causes = {i: late if _TIMED_OUT in str(error) else _first_line(error) for i, error in failed.items()}
    lines = [f"worker {i} ('{names[i]}' of the RPC group): {cause}" for i, cause in causes.items()]
    kind = SyncTimeout if all(cause is late for cause in causes.values()) else WorkerDied
    raise kind("\n".join(lines), causes) from next(iter(failed.values()))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
