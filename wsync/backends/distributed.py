"""``torch.distributed``: workers on any machine. Those on the sender's machine take weights from its shared memory."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

import torch
from torch import distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from wsync.options import SchemeOptions
from wsync.process_group import INLINE_BYTES, DistributedTransport, check_backend, device_of
from wsync.rendezvous import TorchStoreRendezvous
from wsync.scheme import WeightSyncScheme
from wsync.weights.strategy import Format


class DistributedWeightSyncScheme(WeightSyncScheme):
    """Weight synchronization over ``torch.distributed``.

    A worker finds the sender by the pickled scheme. Where each process makes its own scheme (``torchrun``), the
    sender's address is looked up in a ``torch.distributed`` store of all processes: ``store``, or that of the
    initialised default group, or the one of ``torchrun``.

    Args:
        backend: ``"gloo"``, or ``"nccl"`` for weights on GPUs.
        host: the sender's address, by which workers reach it; loopback by default.
        checksum: whether an update carries a checksum, which a worker checks before it prepares or installs it. None:
            where it crosses a network, not in shared memory.
        shared_memory: whether workers on the sender's machine take weights from its memory, in a fraction of the time.
            False sends to all by gloo, as over a network; nccl, and a user's group, always do.
        inline_bytes: updates with at most this many bytes of weights and extra state travel in the announcing message,
            which is faster than by gloo, and needs a socket that takes them at once; 0: all by gloo. Without effect in
            shared memory, with nccl, and with a group of the user's.
        group: a process group of the user's with the sender and all workers in it, to carry the weights: worker 0 is
            its first rank that is not the sender's, and so on. By default each worker has a group of its own.
        store: where the sender's address is looked up by processes without a pickled scheme. The store may list several
            senders of one model. A worker takes the one that its scheme was connected to last; else the oldest that is
            still open and to which this process has not been connected. So a second scheme of the same name in one
            process gets the second sender, and a restarted worker gets the newest one if the older ones have ended.
        strategy, sync, timeout, bind, options: see ``WeightSyncScheme``.
    """

    name = "distributed"
    collectors: ClassVar[tuple[str, ...]] = (
        "distributed",
        "distributed_async",
        "rpc",
        "rpc_async",
        "ray",
        "ray_async",
        "single",
    )

    def __init__(
        self,
        backend: str = "gloo",
        sync: bool = True,
        timeout: float | None = 60.0,
        *,
        strategy: Format = "tensordict",
        host: str = "127.0.0.1",
        bind: bool = True,
        checksum: bool | None = None,
        shared_memory: bool = True,
        inline_bytes: int = INLINE_BYTES,
        group: dist.ProcessGroup | None = None,
        store: Store | None = None,
        **options: Unpack[SchemeOptions],
    ) -> None:
        super().__init__(strategy, sync, timeout=timeout, bind=bind, **options)
        self.backend = check_backend(backend)
        self.host = host
        self.checksum = checksum
        self.shared_memory = shared_memory
        self.inline_bytes = inline_bytes
        self._group = group
        self._rendezvous = TorchStoreRendezvous(host, store)

    def create_transport(self, worker_idx: int | None = None) -> DistributedTransport:
        """Return the transport to (or in) a worker: a process group of two, or the user's group."""
        return DistributedTransport(
            backend=self.backend, group=self._group, worker=worker_idx or 0, inline_bytes=self.inline_bytes
        )

    def create_rendezvous(self) -> TorchStoreRendezvous:
        """See ``WeightSyncScheme``."""
        return self._rendezvous

    @property
    def device(self) -> torch.device:
        """See ``WeightSyncScheme``."""
        return device_of(self.backend)

    def _uses_arena(self) -> bool:
        return self.shared_memory and self.backend == "gloo" and self._group is None

    def __getstate__(self) -> dict[str, Any]:
        """Return the options and the sender's address; a group belongs to this process."""
        return {**super().__getstate__(), "_group": None}
