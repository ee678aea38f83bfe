"""``torch.distributed``: workers anywhere on a network, each in a group of two that disturbs nobody else's.

Who is on the sender's machine takes the weights from its memory, and is in no group.

The rendezvous is over a ``TCPStore``, whose address travels in the pickled scheme; or the user's store, or group.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from torch import distributed as dist
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from wsync.deadlines import deadline_in
from wsync.errors import NotConnected, SyncTimeout
from wsync.network.ends import Seed, network_receiver, network_sender
from wsync.network.group import time_until
from wsync.network.receiver import GroupReceiver
from wsync.network.sender import GroupSender
from wsync.ports import SenderPort
from wsync.roles import Trainer, Worker
from wsync.scheme import WeightSyncScheme

_met: set[tuple[bytes, int]] = set()  # senders that were found in a store, by token, and as which worker


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
        checksum: whether an update carries a checksum, which a worker verifies before it stages or applies it. None: it
            does where gloo or nccl carries it, and not from memory to memory.
        shared_memory: whether workers on the sender's machine take weights from its memory, which costs a fraction of
            what a group does. Where False, gloo carries to all: as it would over a network; so does nccl in any
            case, and a group of the user's.
        group: a process group of the user's, in which the sender and all workers are, to carry the weights: worker 0 is
            its first rank that is not the sender's, and so on. Otherwise each worker has a group of its own.
        store: where processes meet that have not been given a pickled scheme. A worker meets the first sender of its
            model there that is still open, and that it has not met before: a second scheme of the same name in all
            processes meets the second of the others, and a worker's process that is started anew the newest.
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
        checksum: bool | None = None,
        shared_memory: bool = True,
        group: dist.ProcessGroup | None = None,
        store: Store | None = None,
    ) -> None:
        super().__init__(strategy, sync, timeout=timeout, bind=bind)
        self.backend = backend
        self.host = host
        self.checksum = checksum
        self.shared_memory = shared_memory
        self._group = group
        self._store = store
        self._dialled: Store | None = None  # that of torchrun's agent
        self._announced = False
        self._found: Seed | None = None  # of the sender that this worker has met in a store

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """The rendezvous: see ``WeightSyncScheme.connect``."""
        role = self._role
        if isinstance(role, Trainer) and not self._announced and self._can_meet():
            _announce(self._meeting_store(deadline_in(self.timeout)), role.model_id, self._seed.dump())
            self._announced = True
        super().connect(worker_idx=worker_idx, weights=weights)
        if isinstance(role, Worker) and self._found is not None:
            _met.add((self._found.endpoint.token, role.receiver.worker_idx))  # not before: it may try once more

    def shutdown(self) -> None:
        """Let everything go: see ``WeightSyncScheme.shutdown``."""
        super().shutdown()
        self._dialled = self._found = None
        self._announced = False

    def _make_sender_end(self, num_workers: int) -> tuple[GroupSender, Seed]:
        return network_sender(
            num_workers, self.host, self.backend, self._group, shared_memory=self.shared_memory, checksum=self.checksum
        )

    def _make_receiver_end(self, seed: Seed | None) -> GroupReceiver:
        find = self._find_senders if seed is None else lambda worker, deadline: [seed]
        return network_receiver(find, backend=self.backend, retains=self.bind, timeout=self.timeout, group=self._group)

    def _can_meet(self) -> bool:
        return self._store is not None or dist.is_initialized() or "TORCHELASTIC_RUN_ID" in os.environ

    def _find_senders(self, worker: int, deadline: float | None) -> Iterable[Seed]:
        """Those whom ``worker`` may mean, in the order in which they announced themselves; waits for the next one."""
        if self._found is not None:
            yield self._found
        store, model_id = self._meeting_store(deadline), self._worker("connect").model_id
        for seed in _announced(store, model_id, worker, deadline):
            if (seed.endpoint.token, worker) not in _met:
                self._found = seed
                yield seed

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
        return {
            **super().__getstate__(),
            "_group": None,
            "_store": None,
            "_dialled": None,
            "_announced": False,
            "_found": None,
        }


def _key(model_id: str, number: int) -> str:
    return f"wsync/{model_id}/{number}"


def _announce(store: Store, model_id: str, where: str) -> None:
    """Say where the next sender of ``model_id`` is."""
    for number in count(1):
        if store.compare_set(_key(model_id, number), "", where).decode(errors="replace") == where:
            return


def _announced(store: Store, model_id: str, worker: int, deadline: float | None) -> Iterator[Seed]:
    """Where all senders of ``model_id`` are or were; waits for the next one.

    Raises:
        SyncTimeout: none comes until ``deadline``.
        NotConnected: somebody else has written into the store.
    """
    for number in count(1):
        key = _key(model_id, number)
        try:
            store.wait([key], time_until(deadline))
        except RuntimeError as error:
            former = f" ({number - 1} before it have gone, or were met)" if number > 1 else ""
            raise SyncTimeout(f"worker {worker}: no sender has announced itself as '{key}' in time{former}") from error
        try:
            yield Seed.load(store.get(key).decode(errors="replace"))
        except ValueError as error:
            raise NotConnected(f"worker {worker}: what the store has under '{key}' is no sender's: {error}") from error


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
