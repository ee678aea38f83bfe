"""``torch.distributed.rpc`` brings a worker and its sender together; updates travel as by ``distributed``.

A worker gets the sender's address from the trainer by a call. After that, nothing is called: a call for each update
would take several times as long as the update.
"""

from __future__ import annotations

import secrets
from typing import Any, ClassVar, Unpack
from weakref import WeakValueDictionary

import torch
from torch.distributed import rpc

from wsync.control import Address, Connection, Listener, connect
from wsync.control.processes import Processes
from wsync.deadlines import remaining
from wsync.errors import NotConnected, SyncTimeout
from wsync.options import SchemeOptions
from wsync.process_group import INLINE_BYTES, DistributedTransport, check_backend, device_of
from wsync.rendezvous import SocketRendezvous
from wsync.scheme import WeightSyncScheme
from wsync.weights.strategy import Format

_NO_TIMEOUT = 0.0  # in RPC's terms
_TIMED_OUT = "RPCErr:1:"  # how torch begins the message of a call that has timed out
_listeners: WeakValueDictionary[str, Listener] = WeakValueDictionary()  # of this process's senders, by key


def address_of(key: str) -> Address:
    """Return the address of a sender. Called in the sender's process, by a worker, through RPC.

    Raises:
        NotConnected: there is no such sender.
    """
    listener = _listeners.get(key)
    if listener is None:
        raise NotConnected("there is no such sender here (any more)")
    return listener.address


def own_name() -> str:
    """Return this process's name in RPC.

    Raises:
        NotConnected: RPC is not initialised here.
    """
    try:
        return rpc.get_worker_info().name
    except RuntimeError as error:
        raise NotConnected(
            "torch.distributed.rpc is not initialised in this process: call init_rpc(name, rank=…, world_size=…) first"
        ) from error


class RpcRendezvous(SocketRendezvous):
    """Workers ask the trainer by an RPC call for the sender's address, and connect by TCP.

    Args:
        host: the sender's address.
        trainer: the sender's name in RPC.
    """

    def __init__(self, host: str, trainer: str) -> None:
        super().__init__(host)
        self._trainer = trainer

    def open(self) -> tuple[Listener, str]:
        """See ``Rendezvous``: workers ask for the address by a key."""
        listener, _ = super().open()
        key = secrets.token_hex(16)
        _listeners[key] = listener
        return listener, key

    def dial(self, address: str, model_id: str, worker: int, deadline: float | None) -> Connection:
        """See ``Rendezvous``."""
        own_name()
        left = remaining(deadline)
        timeout = _NO_TIMEOUT if left is None else max(left, 0.001)
        try:
            found = rpc.rpc_sync(self._trainer, address_of, args=(address,), timeout=timeout)
        except RuntimeError as error:
            sender = f"worker {worker}: the sender '{self._trainer}'"
            if _TIMED_OUT in str(error):
                raise SyncTimeout(f"{sender} did not answer in time: is it stopped, or busy?") from error
            raise NotConnected(f"{sender} is gone, has been shut down, or has another name: {error}") from error
        return connect(found, worker, deadline)


class RPCTransport(DistributedTransport):
    """Weights through ``torch.distributed``, to a worker in an RPC group.

    Args:
        collector_info: the worker's ``WorkerInfo``, for reference.
        collector_rref: a remote reference to its collector, for reference.
        collector_class: the class of that collector, for reference.
        worker_rank: without a scheme, the worker's rank in the default group.
        options: as for ``DistributedTransport``.
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
    """Weight synchronization between members of a ``torch.distributed.rpc`` group.

    ``init_rpc`` has been called in all of them. The first weights are delivered by the first ``send``.

    Args:
        backend, checksum, shared_memory, inline_bytes: see ``DistributedWeightSyncScheme``.
        host: the sender's address, by which workers reach it; loopback by default.
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
        inline_bytes: int = INLINE_BYTES,
        trainer: str = "trainer",
        **options: Unpack[SchemeOptions],
    ) -> None:
        super().__init__(strategy, sync, timeout=timeout, bind=bind, **options)
        self.backend = check_backend(backend)
        self.host = host
        self.checksum = checksum
        self.shared_memory = shared_memory
        self.inline_bytes = inline_bytes
        self.trainer = trainer

    def create_transport(self, worker_idx: int | None = None) -> RPCTransport:
        """Return the transport to (or in) a worker."""
        return RPCTransport(backend=self.backend, worker=worker_idx or 0, inline_bytes=self.inline_bytes)

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
        if self.is_sender and own_name() != self.trainer:
            raise NotConnected(
                f"the trainer is '{own_name()}' in RPC, and workers call '{self.trainer}': give trainer="
            )
        super().connect(worker_idx=worker_idx, weights=weights, processes=processes)
