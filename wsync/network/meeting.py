"""Where a trainer and its workers form their lines of tensors: in shared memory with one, in a group with another.

One group per worker: groups are static, so that a worker which is started anew can have a new one, and the death of
another worker is none of its business. They meet through a ``TCPStore`` that the trainer keeps, on an address that it
chose and a port that the system chose. No default group is needed, and none of the user's is touched. A worker that can
open the trainer's memory says so there, and needs no group.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroup,
    ProcessGroupGloo,
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from wsync.deadlines import deadline_in
from wsync.errors import NotConnected
from wsync.network.group import GroupPair, UsersPair, inherited, time_until
from wsync.network.listening import listen_on
from wsync.network.pair import Incoming, Outgoing
from wsync.network.same_host import HostIncoming, HostMemory, HostOutgoing, Whereabouts

BACKENDS = ("gloo", "nccl")
_FORMING = 600.0  # seconds in which both ends of a pair have to come, where there is no limit: who gave up ends by then
_LATER = 1.0  # seconds that a half waits beyond the deadline: whoever waits for it ends first, and says what it was
_NEAR = "near"  # the worker's word that it has opened the trainer's memory (b"1"), or has not


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where pairs are formed: the trainer's store. Travels in a pickled scheme.

    Attributes:
        host: its address.
        port: on which it listens.
        backend: of the groups.
        memory: where the trainer's is, for those on its machine; None if that is not to be used.
    """

    host: str
    port: int
    backend: str
    memory: Whereabouts | None = None

    def join(self, worker: int, generation: int, deadline: float | None) -> Callable[[], Incoming]:
        """What forms a worker's half of ``MeetingPlace.pair``, or raises as ``visit``, or RuntimeError.

        It may wait beyond ``deadline`` if the store's process is stopped, as ``torch`` does: ``forming.py`` calls it.
        """
        return partial(self._join, worker, generation, deadline)

    def _join(self, worker: int, generation: int, deadline: float | None) -> Incoming:
        deadline = _a_little_after(deadline)
        store = self.visit(worker, generation, deadline)
        if self.memory is not None:
            descriptor = self.memory.open()
            store.set(_NEAR, "0" if descriptor is None else "1")
            if descriptor is not None:
                return HostIncoming(self.memory, descriptor, worker, generation)
        return self.form(store, 1, _address_towards(self.host, self.port), deadline)

    def visit(self, worker: int, generation: int, deadline: float | None) -> Store:
        """The store, as far as it is one pair's.

        Raises:
            NotConnected: there is none (any more), or it cannot be reached.
        """
        try:
            store = TCPStore(self.host, self.port, is_master=False, timeout=time_until(deadline))
        except (RuntimeError, OSError) as error:
            raise NotConnected(
                f"worker {worker}: the store at {self.host} port {self.port} cannot be reached: {error}"
            ) from error
        return PrefixStore(f"wsync/{worker}/{generation}", store)

    def form(self, store: Store, rank: int, host: str, deadline: float | None) -> GroupPair:
        """One half of a group, in which ``host`` is this end's address; waits for the other half.

        Raises:
            RuntimeError: it has not come in time.
        """
        store.set_timeout(time_until(deadline))
        if self.backend == "nccl":
            from torch.distributed import ProcessGroupNCCL  # only builds for CUDA have it

            return GroupPair(ProcessGroupNCCL(store, rank, 2, ProcessGroupNCCL.Options()), 1 - rank)
        options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._threads = 1  # sends and receives need none
        options._timeout = time_until(deadline)
        return GroupPair(ProcessGroupGloo(store, rank, 2, options), 1 - rank)


class MeetingPlace:
    """The trainer's store, its memory, and its half of every pair (a ``Place``).

    Args:
        host: the address that it listens on.
        backend: ``"gloo"`` or ``"nccl"``.
        workers: how many there can be.
        shared_memory: whether those on this machine take weights from shared memory. Those of nccl never do.
    """

    def __init__(self, host: str, backend: str, workers: int = 1, *, shared_memory: bool = False) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"unknown backend {backend!r} of torch.distributed: choose one of {', '.join(BACKENDS)}")
        if backend == "nccl" and not distributed.is_nccl_available():
            raise ValueError("this build of PyTorch has no nccl: choose backend=gloo")
        self._pid = os.getpid()
        self._device = device_of(backend)
        # The store's own listening would be on every interface; given a socket, it takes the address of that.
        with listen_on(host) as sock:
            port = sock.getsockname()[1]
            self._store: Store | None = TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=_given_away(sock)
            )
        self._memory = HostMemory(workers) if shared_memory and backend == "gloo" else None
        self.meeting = Meeting(host, port, backend, None if self._memory is None else self._memory.whereabouts)

    def pair(self, worker: int, generation: int, deadline: float | None) -> Callable[[], Outgoing]:
        """What forms a line with a worker, who calls ``Meeting.join`` meanwhile; RuntimeError if it does not in time.

        It is a client of its own: one that waits in vain delays no other, and ends with the store.
        """
        deadline = _a_little_after(deadline)
        store = self.meeting.visit(worker, generation, deadline)
        return partial(self._pair, store, worker, generation, deadline)

    def _pair(self, store: Store, worker: int, generation: int, deadline: float | None) -> Outgoing:
        if self._memory is not None:
            store.set_timeout(time_until(deadline))
            if store.get(_NEAR) == b"1":
                return HostOutgoing(self._memory, worker, generation)
        return self.meeting.form(store, 0, self.meeting.host, deadline)

    def room(self, nbytes: int) -> Tensor:
        """A flat buffer ``uint8[nbytes]``, to be packed into; as large as all others.

        Raises:
            WeightSyncError: the machine has no memory left for it.
        """
        if self._memory is not None:
            return self._memory.room(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)

    def close(self) -> None:
        """Close the store, and let the memory go; harmless when repeated."""
        if os.getpid() != self._pid and self._store is not None:
            inherited.append(self._store)
        self._store = None
        if self._memory is not None:
            self._memory.close()


class UsersPlace:
    """A process group of the user's, in which all lines are (a ``Place``).

    Args:
        group: has the trainer and all workers in it.
        tag_of: the tag of a worker's messages, by its generation.
        device: where weights are packed.
    """

    def __init__(self, group: ProcessGroup, tag_of: Callable[[int], int], device: torch.device) -> None:
        self._group = group
        self._tag_of = tag_of
        self._device = device

    def pair(self, worker: int, generation: int, deadline: float | None) -> Callable[[], Outgoing]:
        """There is nothing to wait for."""
        other = worker + (worker >= self._group.rank())
        return partial(UsersPair, self._group, other, self._tag_of(generation))

    def room(self, nbytes: int) -> Tensor:
        """A flat buffer ``uint8[nbytes]``, to be packed into."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)

    def close(self) -> None:
        """The group is the user's."""


def device_of(backend: str) -> torch.device:
    """Where ``backend`` has weights packed and received."""
    return torch.device("cuda" if backend == "nccl" else "cpu")


def _a_little_after(deadline: float | None) -> float:
    moment = deadline_in(_FORMING) if deadline is None else deadline + _LATER
    assert moment is not None, "a number of seconds was given"
    return moment


def _given_away(sock: socket.socket) -> int:
    """A descriptor that its receiver closes."""
    return sock.dup().detach()


def _address_towards(host: str, port: int) -> str:
    """The address of this machine by which ``host`` reaches it."""
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as sock:
        sock.connect(where)  # sends nothing
        return sock.getsockname()[0]
