"""``torch.distributed``: workers anywhere on a network, each in a group of two that disturbs nobody else's.

The rendezvous is over a ``TCPStore``, whose address travels in the pickled scheme; or the user's store, or group.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from torch import distributed as dist
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from wsync.deadlines import deadline_in
from wsync.errors import NotConnected, SyncTimeout
from wsync.group import time_until
from wsync.group_receiver import GroupReceiver
from wsync.group_sender import GroupSender
from wsync.network_ends import Seed, network_receiver, network_sender
from wsync.ports import SenderPort
from wsync.roles import Trainer
from wsync.scheme import WeightSyncScheme

_inits: Counter[str] = Counter()  # how often a model of that name was initialised here: both ends count alike


class DistributedTransport(SenderPort):
    """The sender's line to some workers."""


class DistributedWeightSyncScheme(WeightSyncScheme):
    """Weight synchronization over ``torch.distributed``.

    A worker finds the sender by the pickled scheme. Where each process makes its own (``torchrun``), they meet in a
    store that all know: ``store``, or that of the initialised default group, or the one that ``torchrun`` keeps.

    Args:
        backend: ``"gloo"``, or ``"nccl"`` for weights on GPUs.
        sync: whether ``send`` waits until its promise holds.
        timeout: seconds for ``connect`` and ``send``; None for no limit.
        strategy: the format in which weights are handed out.
        host: the sender's address. Loopback, unless somebody says which interface may be reached from outside.
        bind: whether parameters may be bound to received memory. Say False for workers that train.
        checksum: whether each update carries a checksum, which a worker verifies before it stages or applies it.
        group: a process group of the user's, in which the sender and all workers are, to carry the weights: worker 0 is
            its first rank that is not the sender's, and so on. Otherwise each worker has a group of its own.
        store: where processes meet that have not been given a pickled scheme.
    """

    name = "distributed"
    _transport = DistributedTransport

    def __init__(
        self,
        backend: str = "gloo",
        sync: bool = True,
        timeout: float | None = 60.0,
        *,
        strategy: Any = "tensordict",
        host: str = "127.0.0.1",
        bind: bool = True,
        checksum: bool = True,
        group: dist.ProcessGroup | None = None,
        store: Store | None = None,
    ) -> None:
        super().__init__(strategy, sync, timeout=timeout, bind=bind)
        self.backend = backend
        self.host = host
        self.checksum = checksum
        self._group = group
        self._store = store
        self._dialled: Store | None = None  # that of torchrun's agent
        self._key = ""

    def init_on_sender(self, model_id: str = "policy", context: Any = None, **given: Any) -> None:
        """Set up the trainer's end: see ``WeightSyncScheme.init_on_sender``."""
        super().init_on_sender(model_id, context, **given)
        self._key = _next_key(model_id)

    def init_on_receiver(self, model_id: str = "policy", context: Any = None, **given: Any) -> None:
        """Set up a worker's end: see ``WeightSyncScheme.init_on_receiver``."""
        super().init_on_receiver(model_id, context, **given)
        if self._seed is None:
            self._key = _next_key(model_id)  # not before: an init that failed is none

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """The rendezvous: see ``WeightSyncScheme.connect``."""
        if isinstance(self._role, Trainer) and self._can_meet():
            self._meeting_store(deadline_in(self.timeout)).set(self._key, self._seed.dump())
        super().connect(worker_idx=worker_idx, weights=weights)

    def shutdown(self) -> None:
        """Let everything go: see ``WeightSyncScheme.shutdown``."""
        super().shutdown()
        self._dialled = None

    def _make_sender_end(self, num_workers: int) -> tuple[GroupSender, Seed]:
        return network_sender(num_workers, self.host, self.backend, self._group, checksum=self.checksum)

    def _make_receiver_end(self, seed: Seed | None) -> GroupReceiver:
        find = self._find_sender if seed is None else lambda worker, deadline: seed
        return network_receiver(find, backend=self.backend, retains=self.bind, timeout=self.timeout, group=self._group)

    def _can_meet(self) -> bool:
        return self._store is not None or dist.is_initialized() or "TORCHELASTIC_RUN_ID" in os.environ

    def _find_sender(self, worker: int, deadline: float | None) -> Seed:
        store = self._meeting_store(deadline)
        try:
            store.wait([self._key], time_until(deadline))
        except RuntimeError as error:
            raise SyncTimeout(f"worker {worker}: no sender has announced itself as '{self._key}' in time") from error
        try:
            return Seed.load(store.get(self._key).decode(errors="replace"))
        except ValueError as error:
            raise NotConnected(
                f"worker {worker}: what the store has under '{self._key}' is no sender's: {error}"
            ) from error

    def _meeting_store(self, deadline: float | None) -> Store:
        """Where processes meet that share no pickled scheme."""
        if self._store is not None:
            return self._store
        if dist.is_initialized():
            return dist.distributed_c10d._get_default_store()
        if self._dialled is None:
            self._dialled = _agents_store(deadline)
        return self._dialled

    def __getstate__(self) -> dict[str, Any]:
        """Options and the way to the sender; a group and a store are things of this process."""
        return {**super().__getstate__(), "_group": None, "_store": None, "_dialled": None}


def _next_key(model_id: str) -> str:
    _inits[model_id] += 1
    return f"wsync/{model_id}/{_inits[model_id]}"


def _agents_store(deadline: float | None) -> Store:
    """The store that ``torchrun`` keeps.

    Raises:
        NotConnected: it cannot be reached.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(host, port, is_master=False, timeout=time_until(deadline))
    except RuntimeError as error:
        raise NotConnected(f"torchrun's store at {host} port {port} cannot be reached: {error}") from error
    # It outlives the workers: those that are started again must not find the trainer of the attempt before.
    return PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
