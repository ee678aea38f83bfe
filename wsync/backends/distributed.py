"""``torch.distributed``: workers on any machine. Those on the sender's machine take weights from its shared memory."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

import torch
from torch.distributed import Store, is_nccl_available  # pyright: ignore[reportPrivateImportUsage]

from wsync.control.rendezvous import Rendezvous, TorchStoreRendezvous
from wsync.media.cuda import with_index
from wsync.media.group import INLINE_BYTES, GroupMedium
from wsync.registry import SchemeOptions
from wsync.scheme import WeightSyncScheme
from wsync.weights.strategy import Format


class GroupScheme(WeightSyncScheme):
    """Base of the schemes whose weights go through shared memory, small messages, and process groups."""

    def __init__(
        self,
        strategy: Format = "tensordict",
        backend: str = "gloo",
        *,
        sync: bool = True,
        host: str = "127.0.0.1",
        shared_memory: bool = True,
        inline_bytes: int = INLINE_BYTES,
        **options: Unpack[SchemeOptions],
    ) -> None:
        super().__init__(strategy, sync, **options)
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"unknown backend {backend!r} of torch.distributed: choose gloo or nccl")
        if backend == "nccl" and not is_nccl_available():
            raise ValueError("this build of PyTorch has no nccl: choose backend=gloo")
        self.backend = backend
        self.host = host
        self.shared_memory = shared_memory
        self.inline_bytes = inline_bytes

    def create_rendezvous(self) -> Rendezvous:
        return Rendezvous(self.host)

    def make_medium(self, worker_idx: int) -> GroupMedium:
        return GroupMedium(self.backend, self.inline_bytes, self.timeout)

    @property
    def arena(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.shared_memory and self.backend == "gloo"

    @property
    def device(self) -> torch.device:
        return with_index("cuda" if self.backend == "nccl" else "cpu")


class DistributedWeightSyncScheme(GroupScheme):
    """Weight synchronization over ``torch.distributed``.

    A worker finds the sender by the pickled scheme. Where each process makes its own scheme (``torchrun``), the
    sender's address is looked up in ``store``, or the store of the default group, or that of ``torchrun``. These
    processes share a key: ``WSYNC_AUTHKEY``, or a file that only this user can read.

    Args:
        backend: ``"gloo"``, or ``"nccl"`` for weights on GPUs.
        host: the sender's address, by which workers reach it; loopback by default.
        port: where it listens; 0 for any free one. With a port, processes share the key, and a ``wsync_reader`` joins
            by ``tcp://host:port``.
        shared_memory: whether workers on the sender's machine take weights from its memory, in a fraction of the time.
            Without it, and always with nccl, all are sent them as over a network.
        inline_bytes: updates with at most this many bytes travel in the announcing message; larger ones by gloo, each
            worker in a process group of its own. Without effect in shared memory and nccl.
        store: a ``torch.distributed`` store. A worker takes the sender that its scheme was connected to last; else the
            oldest one that is still there and to which this process has not been connected.
        strategy, sync, timeout, options: as in ``WeightSyncScheme``.
    """

    name = "distributed"
    collectors: ClassVar[tuple[str, ...]] = (
        *("distributed", "distributed_async", "rpc", "rpc_async", "ray", "ray_async", "single"),
    )

    def __init__(
        self,
        backend: str = "gloo",
        sync: bool = True,
        timeout: float | None = 60.0,
        *,
        strategy: Format = "tensordict",
        store: Store | None = None,
        port: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(strategy, backend, sync=sync, timeout=timeout, **options)
        self.port = port
        self._rendezvous = TorchStoreRendezvous(self.host, store, port)

    def create_rendezvous(self) -> TorchStoreRendezvous:
        return self._rendezvous
