"""The collector with workers in a ``torch.distributed.rpc`` group; commands and batches go over TCP connections."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.connection import wait
from typing import Any, NoReturn

from torch.distributed import rpc

from collectors.arguments import EnvMaker
from collectors.distributed import rpc_group
from collectors.distributed.rpc_group import host_store, is_member, join_or_end, leave_group
from collectors.distributed.tcp import resolved
from collectors.worker_collector import WorkerCollector
from collectors.workers import processes
from collectors.workers.connections import Disconnected, Listener, milliseconds
from collectors.workers.pool import WorkerHandle, WorkerPool
from wsync import SyncTimeout, WorkerDied

_TIMED_OUT = "RPCErr:1:"  # prefix of torch's message for a call that has timed out


class RPCCollector(WorkerCollector):
    """Collects batches with workers that are called by RPC (TensorPipe).

    By default it starts its workers itself, on this machine, and a group in which the trainer is ``"trainer"`` and they
    are ``"worker0"``, ``"worker1"`` …; both end with it. Or it uses members of a group that this process has joined by
    ``init_rpc``; those stay in it afterwards.

    Args:
        create_env_fn: one function per worker; this, ``policy``, ``sync`` and ``options``: see ``WorkerCollector``.
        workers: names in the group of this process, one per worker. ``threads`` has no effect on them.
        host: the interface of a group that is started, and the one on which the default scheme listens; give it with
            ``workers`` if they are on other machines. Unless ``TP_SOCKET_IFNAME`` is set, a loopback address keeps all
            of the group's traffic on the loopback interface.
        timeout: seconds in which the workers have to join.

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


class RpcPool(WorkerPool):
    """Workers of an RPC group, which connect to this process over TCP; ``RPCCollector`` documents the arguments."""

    def __init__(self, count: int, *, names: Sequence[str] | None, host: str, timeout: float) -> None:
        if names is None and is_member():
            raise RuntimeError(
                "this process belongs to an RPC group already: give the names of its workers (workers=[…]), "
                "or shut the other collector down (rpc.shutdown() ends a group of your own)"
            )
        if names is not None:
            _check_names(count, names)
        super().__init__(count, Listener(host and resolved(host)), start=False)
        self._store: Any = None
        self._joined = False
        try:
            if names is None:
                self._start_group(count, host, milliseconds(timeout) / 1e3)  # torch's RPC counts them in an int, too
            else:
                self._enlist(names, timeout)
            self.wait_for_workers(timeout)
        except BaseException:  # also Ctrl-C: a group that has begun to form is left
            self.close()
            raise
        self.listener.close()

    def _enlist(self, names: Sequence[str], timeout: float) -> None:
        """Have members of the group start a worker in a thread each; all at once, with one deadline."""
        calls = []
        for i, name in enumerate(names):
            worker = WorkerHandle(i, secrets.token_hex(16).encode(), name=f"('{name}' of the RPC group)")
            self.workers.append(worker)
            arguments = (self.listener.address, i, worker.key)
            calls.append(rpc.rpc_async(name, rpc_group.enlist, args=arguments, timeout=timeout))
        failed: dict[int, RuntimeError] = {}
        for i, call in enumerate(calls):
            try:
                call.wait()
            except RuntimeError as error:
                failed[i] = error
        if failed:
            _raise_for(failed, names, timeout)

    def _start_group(self, count: int, host: str, timeout: float) -> None:
        """Start processes, which join a group with this one and connect to it."""
        self._store, store_address = host_store(host)
        for i in range(count):
            key = secrets.token_hex(16).encode()
            process = processes.start(
                rpc_group.main, i, self.listener.address, i, key, count + 1, store_address, timeout
            )
            self.workers.append(WorkerHandle(i, key, process))
        dead = join_or_end(count + 1, store_address, [worker.sentinel for worker in self.workers], timeout)
        for worker in self.workers:
            if worker.sentinel == dead:
                cause = f"{worker.exit_reason()}, before it had joined"
                raise WorkerDied(f"worker {worker.worker_idx} {cause}", {worker.worker_idx: cause})
        self._joined = True

    def close(self) -> None:
        """End the workers, and a group that was started for them."""
        if self._joined:
            self._joined = False
            self._end_workers()
            leave_group()  # before the workers: torch logs errors in the member that is left alone
        super().close()
        self._store = None

    def _end_workers(self) -> None:
        """Have all workers close their environments, and say so within the grace period."""
        for worker in self.workers:
            worker.send("end")
        for worker in self.workers:
            connection = worker.connection
            try:
                while connection is not None and worker.process is not None:
                    ready = wait([connection.fileno(), worker.process.sentinel], processes.SHUTDOWN_GRACE)
                    if connection.fileno() not in ready or connection.receive()[0] == "ended":
                        break
            except Disconnected:
                continue


def _check_names(count: int, names: Sequence[str]) -> None:
    if not is_member():
        raise RuntimeError("workers=[…] are names in an RPC group: call torch.distributed.rpc.init_rpc() first")
    if len(names) != count:
        raise ValueError(f"{len(names)} names of workers for {count} environment functions")
    if len(set(names)) < count:
        raise ValueError(f"a process can be one worker, and names has one twice: {', '.join(names)}")


def _raise_for(failed: Mapping[int, RuntimeError], names: Sequence[str], timeout: float) -> NoReturn:
    late = f"did not answer within {timeout:g} s"
    causes = {i: late if _TIMED_OUT in str(one) else str(one).partition("\n")[0] for i, one in failed.items()}
    lines = [f"worker {i} ('{names[i]}' of the RPC group): {cause}" for i, cause in causes.items()]
    kind = SyncTimeout if all(cause is late for cause in causes.values()) else WorkerDied
    raise kind("\n".join(lines), causes) from next(iter(failed.values()))
