"""Workers that are members of a ``torch.distributed.rpc`` group; its other member is the trainer."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from backends import BuiltIn, OwnHosts
from torch.distributed import (
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    register_rendezvous_handler,
    rpc,
)

from wsync.testing import Worker, WorkerGroup, WorkerPool, commands, workers

os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
SPARES = 2
"""Members that stand by: after the death of a member, a group admits no other."""

_groups = itertools.count()
_stores: dict[int, Any] = {}
"""The stores that this process holds, by port: RPC would make a second one."""


@dataclass(frozen=True)
class Membership:
    """What a process needs to join a group.

    Attributes:
        port: of the group's store.
        group: how many groups the trainer has been in; RPC puts it into every key of the store.
        rank: of the process.
        name: by which RPC addresses the process.
    """

    port: int
    group: int
    rank: int
    name: str

    def join(self) -> None:
        """Join; returns when the other members know of this one."""
        rpc._init_counter = self.group  # pyright: ignore[reportAttributeAccessIssue]
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"held://127.0.0.1:{self.port}",
            num_worker_threads=8,
            rpc_timeout=30,
            _transports=["uv"],
            _channels=["basic"],
        )
        rpc.init_rpc(self.name, rank=self.rank, world_size=None, rpc_backend_options=options)


def _rendezvous(url: str, timeout: Any = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """For URLs ``held://host:port``: the store that this process holds, or a client of another process's."""
    host, port = url.removeprefix("held://").split("?")[0].rsplit(":", 1)
    store = _stores.get(int(port)) or TCPStore(host, int(port), is_master=False)
    yield store, -1, -1


register_rendezvous_handler("held", _rendezvous)


def serve(pipe: Any, membership: Membership) -> None:
    """A worker's main function: ``workers.serve`` as a member of the group."""
    membership.join()
    workers.serve(pipe)
    rpc.shutdown(graceful=False)


class RpcWorkerPool(WorkerPool):
    """A group of the trainer and its workers; a new one after the death of a member. A process has one at a time."""

    _open_pool: ClassVar[RpcWorkerPool | None] = None

    def __init__(self) -> None:
        super().__init__()
        self._store: Any = None
        self._group = 0
        self._ranks = itertools.count()
        self._lost_member = False

    def _open(self) -> None:
        if RpcWorkerPool._open_pool is not None:
            RpcWorkerPool._open_pool.close()
        RpcWorkerPool._open_pool = self
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        _stores[self._store.port] = self._store
        self._group, self._ranks = next(_groups), itertools.count(1)
        Membership(self._store.port, self._group, 0, "trainer").join()

    def start_workers(self, count: int) -> list[Worker]:
        started: list[Worker] = []
        for rank in itertools.islice(self._ranks, count):
            membership = Membership(self._store.port, self._group, rank, f"worker{rank}")
            started.append(Worker(main=serve, args=(membership,)))
        for worker in started:
            worker.call(commands.reset)  # a group does not survive the death of a member while another one joins
        return started

    @contextmanager
    def group(self, count: int) -> Iterator[WorkerGroup]:
        if self._store is None:
            self._open()
        self._idle += self.start_workers(max(0, count + SPARES - len(self._idle)))
        try:
            with super().group(count) as group:
                yield group
        finally:
            if self._lost_member:
                self.close()

    def discard(self, worker: Worker) -> None:
        super().discard(worker)
        self._lost_member = True

    def close(self) -> None:
        super().close()
        if self._store is not None:
            rpc.shutdown(graceful=False)
            del _stores[self._store.port]
            self._store = RpcWorkerPool._open_pool = None
            self._lost_member = False


class Rpc(BuiltIn):
    """The backend that has these workers."""

    name = "rpc"
    pool_type = RpcWorkerPool


class RpcOwnHosts(OwnHosts, RpcWorkerPool):
    """Such workers, each of which NCCL takes for a machine."""


class RpcNccl(BuiltIn):
    """The backend over NCCL."""

    name = "rpc"
    variant: ClassVar = {"backend": "nccl"}
    pool_type = RpcOwnHosts
