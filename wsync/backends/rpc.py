"""``torch.distributed.rpc`` announces updates; shared memory or process groups carry them.

Shared memory is used on the sender's machine, process groups between machines. A connected worker has no thread of its
own.
"""

from __future__ import annotations

import secrets
from typing import Any, ClassVar, Unpack

import torch

from wsync.backends.rpc_calls import own_name
from wsync.backends.rpc_sender import RpcListener
from wsync.backends.rpc_worker import RpcSenderConnection
from wsync.control import Connection, listen_on
from wsync.control.interfaces import ConnectionSource
from wsync.control.processes import Processes
from wsync.errors import NotConnected
from wsync.legacy.names import OlderGroupTransport
from wsync.options import SchemeOptions
from wsync.process_group import check_backend, device_of
from wsync.rendezvous import Rendezvous
from wsync.scheme import WeightSyncScheme
from wsync.weights.strategy import Format


class RpcRendezvous(Rendezvous):
    """A worker connects by a call to the trainer.

    Args:
        host: the sender's address for process groups.
        trainer: the sender's name in RPC.
    """

    def __init__(self, host: str, trainer: str) -> None:
        self.host = host
        self.trainer = trainer

    def open(self) -> tuple[ConnectionSource, str]:
        """See ``Rendezvous``: workers find the sender by a key."""
        listen_on(self.host).close()  # an address that this machine does not have is an error now
        key = secrets.token_hex(16)
        return RpcListener(key, self.host), key

    def dial(self, address: str, model_id: str, worker: int, deadline: float | None) -> Connection:
        """See ``Rendezvous``."""
        return RpcSenderConnection(address, self.trainer, self.host, worker, deadline)


class RPCTransport(OlderGroupTransport):
    """Weights through ``torch.distributed``, to a worker that is reached by RPC.

    Args:
        collector_info: the worker's ``WorkerInfo``, for reference.
        collector_rref: a remote reference to its collector, for reference.
        collector_class: the class of that collector, for reference.
        worker_rank: without a scheme, the worker's rank in the default group.
        options: as for ``GroupTransport``.
    """

    def __init__(
        self,
        collector_info: Any = None,
        collector_rref: Any = None,
        collector_class: Any = None,
        worker_rank: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**({} if worker_rank is None else {"rank": worker_rank}), **options)
        self.collector_info = collector_info
        self.collector_rref = collector_rref
        self.collector_class = collector_class


class RPCWeightSyncScheme(WeightSyncScheme):
    """Weight synchronization to workers that the trainer reaches by ``torch.distributed.rpc``.

    ``init_rpc`` has been called in all of them. The first weights are delivered by the first ``send``.

    Args:
        backend, checksum, shared_memory: see ``DistributedWeightSyncScheme``.
        host: the sender's address for process groups; loopback by default.
        trainer: the sender's name in RPC.
        strategy, sync, timeout, bind, options: see ``WeightSyncScheme``.
    """

    name = "rpc"
    delivers_at_connect = False
    collectors: ClassVar[tuple[str, ...]] = ("rpc", "rpc_async", "single")

    def __init__(
        self,
        strategy: Format = "tensordict",
        backend: str = "gloo",
        *,
        sync: bool = True,
        timeout: float | None = 60.0,
        host: str = "127.0.0.1",
        bind: bool = True,
        checksum: bool | None = None,
        shared_memory: bool = True,
        trainer: str = "trainer",
        **options: Unpack[SchemeOptions],
    ) -> None:
        super().__init__(strategy, sync, timeout=timeout, bind=bind, **options)
        self.backend = check_backend(backend)
        self.host = host
        self.checksum = checksum
        self.shared_memory = shared_memory
        self.trainer = trainer

    def create_transport(self, worker_idx: int | None = None) -> RPCTransport:
        """Return the transport to (or in) a worker."""
        return RPCTransport(backend=self.backend, worker=worker_idx or 0)

    def create_rendezvous(self) -> RpcRendezvous:
        """See ``WeightSyncScheme``."""
        return RpcRendezvous(self.host, self.trainer)

    @property
    def device(self) -> torch.device:
        """See ``WeightSyncScheme``."""
        return device_of(self.backend)

    def _uses_arena(self) -> bool:
        return self.shared_memory and self.backend == "gloo"

    def connect(
        self, *, worker_idx: int | None = None, weights: Any = None, processes: Processes | None = None
    ) -> None:
        """Connect: see ``WeightSyncScheme.connect``. Weights are delivered only if they are given here.

        Raises:
            NotConnected: RPC is not initialised here, or the trainer has another name there than ``trainer``.
        """
        if self.model_id is not None and own_name() != self.trainer and self.is_sender:
            raise NotConnected(
                f"the trainer is '{own_name()}' in RPC, and workers call '{self.trainer}': give trainer="
            )
        super().connect(worker_idx=worker_idx, weights=weights, processes=processes)
