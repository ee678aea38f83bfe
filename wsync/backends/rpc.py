"""``torch.distributed.rpc``: a worker asks for the sender's address; updates then travel as by ``distributed``."""

from __future__ import annotations

import secrets
from typing import Any, ClassVar

from torch.distributed import rpc

from wsync.backends.distributed import GroupScheme
from wsync.control.auth import Address
from wsync.control.rendezvous import Join, Rendezvous
from wsync.deadlines import remaining
from wsync.errors import NotConnected, SyncTimeout
from wsync.weights.strategy import Format

_TIMED_OUT = "RPCErr:1:"  # how torch begins the message of a call that has timed out
_addresses: dict[str, Address] = {}  # of this process's senders, by the names in their pickled schemes


def address_of(name: str) -> Address:
    """Return the address of a sender; NotConnected: there is none. Called in its process, by a worker, through RPC."""
    if name not in _addresses:
        raise NotConnected("there is no such sender here")
    return _addresses[name]


class RpcRendezvous(Rendezvous):
    """Workers ask the trainer, by its name in RPC, for the sender's address."""

    def __init__(self, host: str, trainer: str) -> None:
        super().__init__(host)
        self._trainer = trainer

    def pickled(self, address: Address) -> str:
        name = secrets.token_hex(16)
        _addresses[name] = address
        return name

    def meet(self, pickled: Any, model_id: str, worker: int, deadline: float | None, join: Join) -> int:
        left = remaining(deadline)
        timeout = 0.0 if left is None else max(left, 0.001)  # in RPC's terms, 0 is no limit
        try:
            address = rpc.rpc_sync(self._trainer, address_of, args=(pickled,), timeout=timeout)
        except RuntimeError as error:
            sender = f"worker {worker}: the sender '{self._trainer}'"
            if _TIMED_OUT in str(error):
                raise SyncTimeout(f"{sender} did not answer in time: is it stopped, or busy?") from error
            raise NotConnected(
                f"{sender} is not in this process's RPC group, or has been shut down: {error}"
            ) from error
        return join(address)


class RPCWeightSyncScheme(GroupScheme):
    """Weight synchronization between members of a ``torch.distributed.rpc`` group.

    ``init_rpc`` has been called in all of them. The first weights are delivered by the first ``send``.

    Args:
        backend, shared_memory, inline_bytes: as in ``DistributedWeightSyncScheme``.
        host: the sender's address, by which workers reach it; loopback by default.
        trainer: the sender's name in RPC.
        strategy, options: as in ``WeightSyncScheme``.
    """

    name = "rpc"
    delivers_at_connect = False
    collectors: ClassVar[tuple[str, ...]] = ("rpc", "rpc_async", "single")

    def __init__(
        self, strategy: Format = "tensordict", backend: str = "gloo", *, trainer: str = "trainer", **options: Any
    ) -> None:
        super().__init__(strategy, backend, **options)
        self.trainer = trainer

    def create_rendezvous(self) -> RpcRendezvous:
        return RpcRendezvous(self.host, self.trainer)
