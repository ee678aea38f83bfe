"""``torch.distributed.rpc`` tells the workers; memory carries on one machine, ``torch.distributed`` between several.

A worker that has joined has no thread of ours.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from wsync.network.meeting import Meeting, MeetingPlace, device_of
from wsync.network.receiver import GroupReceiver
from wsync.network.rpc_calls import own_name
from wsync.network.rpc_trainer import RpcDoor
from wsync.network.rpc_worker import WorkerLine
from wsync.network.sender import GroupSender
from wsync.ports import SenderPort
from wsync.scheme import WeightSyncScheme


@dataclass(frozen=True, slots=True)
class RpcSeed:
    """What a worker needs to find the sender."""

    key: str
    meeting: Meeting


class RPCTransport(SenderPort):
    """The sender's line to some workers."""


class RPCWeightSyncScheme(WeightSyncScheme):
    """Weight synchronization to workers that the trainer reaches by ``torch.distributed.rpc``.

    ``init_rpc`` has been called in all of them. The first weights come with the first ``send``.

    Args:
        strategy: the format in which weights are handed out.
        backend: what carries the weights, ``"gloo"``, or ``"nccl"`` for weights on GPUs.
        sync: whether ``send`` waits until its promise holds.
        timeout: seconds for ``connect`` and ``send``; None for no limit.
        host: the sender's address, where groups are formed. Loopback, unless somebody says which interface may be
            reached from outside.
        bind: whether parameters may be bound to received memory. Say False for workers that train.
        checksum: whether an update carries a checksum, which a worker verifies before it stages or applies it. None: it
            does where gloo or nccl carries it, and not from memory to memory.
        shared_memory: whether workers on the sender's machine take weights from its memory, which costs a fraction of
            what a group does. Where False, gloo carries to all: as it would over a network; so does nccl in any case.
        trainer: the name by which RPC knows the sender.
    """

    name = "rpc"
    _transport = RPCTransport
    delivers_at_connect = False

    def __init__(
        self,
        strategy: Any = "tensordict",
        backend: str = "gloo",
        *,
        sync: bool = True,
        timeout: float | None = 60.0,
        host: str = "127.0.0.1",
        bind: bool = True,
        checksum: bool | None = None,
        shared_memory: bool = True,
        trainer: str = "trainer",
    ) -> None:
        super().__init__(strategy, sync, timeout=timeout, bind=bind)
        self.backend = backend
        self.host = host
        self.checksum = checksum
        self.shared_memory = shared_memory
        self.trainer = trainer

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """The rendezvous: see ``WeightSyncScheme.connect``. Weights are delivered only if they are given here.

        Raises:
            NotConnected: RPC is not initialised here, or the trainer has another name there than ``trainer``.
        """
        if self._role is not None:
            own_name()
        super().connect(worker_idx=worker_idx, weights=weights)

    def _make_sender_end(self, num_workers: int) -> tuple[GroupSender, RpcSeed]:
        place = MeetingPlace(self.host, self.backend, num_workers, shared_memory=self.shared_memory)
        key = secrets.token_hex(16)
        return GroupSender(num_workers, RpcDoor(key), place, checksum=self.checksum), RpcSeed(key, place.meeting)

    def _make_receiver_end(self, seed: RpcSeed) -> GroupReceiver:
        return GroupReceiver(
            lambda worker, deadline: WorkerLine(seed.key, self.trainer, worker, deadline),
            seed.meeting.join,
            retains=self.bind,
            device=device_of(self.backend),
            timeout=self.timeout,
            ahead=self.backend == "gloo",
        )
