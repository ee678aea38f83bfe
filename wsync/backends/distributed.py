"""``torch.distributed``: workers anywhere on a network, in groups of two that disturb nobody else's.

The rendezvous is over a ``TCPStore``; weights go by ``send`` and ``recv`` of one flat tensor. Words (what is coming,
what was installed) go by a TCP line beside the group: neither a store nor a group can be waited for together with a
deadline, a death and other lines, and a gloo ``recv`` that timed out cannot be taken up again.
"""

from __future__ import annotations

import os
import pickle
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from wsync.deadlines import remaining
from wsync.errors import NotConnected, SyncTimeout
from wsync.group import Meeting, MeetingPlace, Pair
from wsync.group_receiver import GroupReceiver
from wsync.group_sender import GroupSender
from wsync.network import NetEndpoint, NetListener, dial
from wsync.ports import SenderPort
from wsync.receiver_thread import Told, receiver_thread
from wsync.roles import Trainer
from wsync.scheme import WeightSyncScheme
from wsync.words import Line

_inits: Counter[str] = Counter()  # how often a model of that name was initialised here: both ends count alike


class DistributedTransport(SenderPort):
    """The sender's line to some workers."""


@dataclass(frozen=True, slots=True)
class Seed:
    """What a worker needs to find the sender, and the pair with it.

    Attributes:
        endpoint: where the sender listens.
        meeting: where pairs are formed; None if they are in a group of the user's.
        rank: the sender's, in the user's group.
        tag: of messages in the user's group.
    """

    endpoint: NetEndpoint
    meeting: Meeting | None
    rank: int = 0
    tag: int = 0


class Threaded:
    """Receivers are told by the process's thread (an ``Attach``)."""

    def attach(self, line: Line, receiver: Told) -> None:
        """Listen."""
        receiver_thread().register(line.fileno(), receiver)

    def detach(self, line: Line, receiver: Told) -> None:
        """Listen no more."""
        receiver_thread().unregister(receiver)


class _Route:
    """A worker's way to the sender, looked for when it connects."""

    def __init__(
        self, seed: Seed | None, find: Callable[[int, float | None], Seed], group: dist.ProcessGroup | None
    ) -> None:
        self._seed = seed
        self._find = find
        self._group = group

    def dial(self, worker: int, deadline: float | None) -> Line:
        if self._seed is None:
            self._seed = self._find(worker, deadline)
        return dial(self._seed.endpoint, worker, deadline)

    def pair(self, worker: int, generation: int, deadline: float | None) -> Pair:
        assert self._seed is not None, "dial() comes first"
        if self._seed.meeting is not None:
            return self._seed.meeting.join(worker, generation, deadline)
        if self._group is None:
            raise NotConnected(f"worker {worker}: the sender was given a process group; give this end the same one")
        return Pair(self._group, self._seed.rank, self._seed.tag)


class DistributedWeightSyncScheme(WeightSyncScheme):
    """Weight synchronization over ``torch.distributed``.

    A worker finds the sender by the pickled scheme. Where each process makes its own (``torchrun``), they meet in a
    store that all know: ``store``, or that of the initialised default group, or the one that ``torchrun`` keeps.

    Args:
        backend: ``"gloo"``, or ``"nccl"`` for weights on GPUs.
        sync: whether ``send`` waits until its promise holds.
        strategy: the format in which weights are handed out.
        timeout: seconds for ``connect`` and ``send``; None for no limit.
        host: the sender's address. Loopback, unless somebody says which interface may be reached from outside.
        bind: whether parameters may be bound to received memory. Say False for workers that train.
        group: a process group of the user's, in which the sender and all workers are, to carry the weights: worker 0 is
            its first rank that is not the sender's, and so on. Otherwise each worker has a group of its own.
        store: where processes meet that have not been given a pickled scheme.
    """

    name = "distributed"

    def __init__(
        self,
        backend: str = "gloo",
        sync: bool = True,
        *,
        strategy: Any = "tensordict",
        timeout: float | None = 60.0,
        host: str = "127.0.0.1",
        bind: bool = True,
        group: dist.ProcessGroup | None = None,
        store: Store | None = None,
    ) -> None:
        super().__init__(strategy, sync, timeout=timeout, bind=bind)
        self.backend = backend
        self.host = host
        self._group = group
        self._store = store
        self._key = ""
        self._device = torch.device("cuda" if backend == "nccl" else "cpu")

    def init_on_sender(self, model_id: str = "policy", context: Any = None, **given: Any) -> None:
        """Set up the trainer's end: see ``WeightSyncScheme.init_on_sender``."""
        super().init_on_sender(model_id, context, **given)
        self._key = _next_key(model_id)

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """The rendezvous: see ``WeightSyncScheme.connect``."""
        store = self._meeting_store() if isinstance(self._role, Trainer) else None
        if store is not None:
            store.set(self._key, pickle.dumps(self._seed).hex())
        super().connect(worker_idx=worker_idx, weights=weights)

    def create_transport(self, *, worker_ids: Sequence[int] | None = None) -> DistributedTransport:
        """The sender's line to some workers (None: all)."""
        role = self._trainer("create_transport")
        return DistributedTransport(role.sender, role.sentinels, worker_ids)

    def _make_sender_end(self, num_workers: int) -> tuple[GroupSender, Seed]:
        place = None if self._group is not None else MeetingPlace(self.host, self.backend)
        try:
            door = NetListener(self.host)
        except OSError:
            if place is not None:
                place.close()
            raise
        if place is not None:
            seed = Seed(door.endpoint, place.meeting)
            return GroupSender(num_workers, door, place.pair, place.close, self._device), seed
        group = self._group
        assert group is not None
        seed = Seed(door.endpoint, None, group.rank(), zlib.crc32(door.endpoint.token) >> 1)

        def pair(worker: int, generation: int, deadline: float | None) -> Pair:
            return Pair(group, worker + (worker >= seed.rank), seed.tag)

        return GroupSender(num_workers, door, pair, lambda: None, self._device), seed

    def _make_receiver_end(self, seed: Seed | None) -> GroupReceiver:
        route = _Route(seed, self._find_sender, self._group)
        return GroupReceiver(
            route.dial,
            route.pair,
            Threaded(),
            retains=self.bind,
            device=self._device,
            timeout=self.timeout,
            ahead=self.backend == "gloo" and self._group is None,
        )

    def _can_meet(self, model_id: str) -> bool:
        self._key = _next_key(model_id)
        return self._meeting_store() is not None

    def _find_sender(self, worker: int, deadline: float | None) -> Seed:
        store = self._meeting_store()
        assert store is not None, "seen to at init"
        left = remaining(deadline)
        try:
            store.wait([self._key], timedelta(days=365) if left is None else timedelta(seconds=max(left, 0.001)))
        except RuntimeError as error:
            raise SyncTimeout(f"worker {worker}: no sender has announced itself as '{self._key}' in time") from error
        return pickle.loads(bytes.fromhex(store.get(self._key).decode()))

    def _meeting_store(self) -> Store | None:
        """Where processes meet that share no pickled scheme; None if there is no such place."""
        if self._store is None:
            if dist.is_initialized():
                return dist.distributed_c10d._get_default_store()
            if "TORCHELASTIC_RUN_ID" in os.environ:
                address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                self._store = TCPStore(*address, is_master=False)
        return self._store

    def __getstate__(self) -> dict[str, Any]:
        """Options and the way to the sender; a group and a store are things of this process."""
        return {**super().__getstate__(), "_group": None, "_store": None}


def _next_key(model_id: str) -> str:
    _inits[model_id] += 1
    return f"wsync/{model_id}/{_inits[model_id]}"
