"""A pair of ranks, a trainer and one worker, and the ``torch.distributed`` group in which weights go between them.

One group per worker: groups are static, so that a worker which is started anew can have a new one, and the death of
another worker is none of its business. They meet through a ``TCPStore`` that the trainer keeps, on an address that it
chose and a port that the system chose. No default group is needed, and none of the user's is touched.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroupGloo,
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from wsync.deadlines import deadline_in, remaining
from wsync.errors import NotConnected
from wsync.network.listening import listen_on

BACKENDS = ("gloo", "nccl")
_FOREVER = timedelta(days=365)
_FORMING = 600.0  # seconds in which both ends of a pair have to come, where there is no limit: who gave up ends by then
_LATER = 1.0  # seconds that a half waits beyond the deadline: whoever waits for it ends first, and says what it was


# Stores and groups that a fork has copied: their threads are the parent's, so they can neither be used nor taken down.
_inherited: list[Any] = []


# By groups of users': what was sent there, and had not been taken yet when the line was closed.
_untaken: WeakKeyDictionary[Any, list[Work]] = WeakKeyDictionary()


class Work(Protocol):
    """A transfer under way."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Return when it is done; raises RuntimeError if it cannot be."""
        ...


class Pair:
    """One end of a line of tensors.

    Args:
        group: has both ends in it.
        other: the other end's rank there.
        tag: of every message.
    """

    def __init__(self, group: Any, other: int, tag: int = 0) -> None:
        self._group: Any = group
        self._other = other
        self._tag = tag
        self._pid = os.getpid()

    def send(self, flat: Tensor, works: list[Work]) -> None:
        """Begin to send, and add the transfer to ``works``; ``flat`` must not change until the other end has answered.

        No signal strikes between the two: the list calls the group, without the interpreter.
        """
        works.extend(map(self._group.send, [[flat]], [self._other], [self._tag]))

    def receive(self, flat: Tensor) -> Work:
        """Begin to receive into ``flat``."""
        return self._group.recv([flat], self._other, self._tag)

    def close(self, under_way: Work | None = None) -> bool:
        """Let go of the group; what is ``under_way`` in a group of our own ends with it, but not in a forked child.

        Returns:
            Whether the other end can take what is ``under_way`` later.
        """
        if os.getpid() != self._pid:
            _inherited.append(self._group)
        self._group = None
        return False


class UsersPair(Pair):
    """One end of a line of tensors in a group of the user's, which goes on without it."""

    def close(self, under_way: Work | None = None) -> bool:
        """Let go of the group; what is ``under_way`` is kept as long as there is the group.

        The other end has been told of it, and where one waits in vain for a message, gloo closes the whole group.
        """
        if under_way is not None:
            _untaken.setdefault(self._group, []).append(under_way)
        super().close()
        return under_way is not None


def patience(timeout: float | None) -> timedelta:
    """So many seconds, as ``torch.distributed`` takes them; None for no limit."""
    return _FOREVER if timeout is None else timedelta(seconds=timeout)


def time_until(deadline: float | None) -> timedelta:
    """How long that is, as ``torch.distributed`` takes it: never 0, which would be no limit."""
    left = remaining(deadline)
    return patience(None if left is None else max(left, 0.001))


def finish(work: Work, wait: timedelta, device: torch.device) -> None:
    """Wait until ``work`` is done, and its data can be read.

    Raises:
        RuntimeError: the other end is gone, or silent for as long as ``wait``.
    """
    work.wait(wait)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where pairs are formed: the trainer's store. Travels in a pickled scheme."""

    host: str
    port: int
    backend: str

    def join(self, worker: int, generation: int, deadline: float | None) -> Callable[[], Pair]:
        """What forms a worker's half of ``MeetingPlace.pair``: see ``begin``.

        It may wait beyond ``deadline`` if the store's process is stopped, as ``torch`` does: ``forming.py`` calls it.
        """
        return lambda: self.begin(1, (worker, generation), deadline)()

    def begin(self, rank: int, name: tuple[int, int], deadline: float | None) -> Callable[[], Pair]:
        """Begin with one half of a pair; what is returned waits for the other one, or raises RuntimeError.

        Raises:
            NotConnected: there is no store (any more), or it cannot be reached.
        """
        deadline = deadline_in(_FORMING) if deadline is None else deadline + _LATER
        try:
            host = _address_towards(self.host, self.port) if rank else self.host
            store = TCPStore(self.host, self.port, is_master=False, timeout=time_until(deadline))
        except (RuntimeError, OSError) as error:
            raise NotConnected(
                f"worker {name[0]}: the store at {self.host} port {self.port} cannot be reached: {error}"
            ) from error
        return partial(_form, store, self.backend, name, rank, host, deadline)


class MeetingPlace:
    """The trainer's store, and its half of every pair.

    Args:
        host: the address that it listens on.
        backend: ``"gloo"`` or ``"nccl"``.
    """

    def __init__(self, host: str, backend: str) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"unknown backend {backend!r} of torch.distributed: choose one of {', '.join(BACKENDS)}")
        if backend == "nccl" and not distributed.is_nccl_available():
            raise ValueError("this build of PyTorch has no nccl: choose backend=gloo")
        self._pid = os.getpid()
        # The store's own listening would be on every interface; given a socket, it takes the address of that.
        with listen_on(host) as sock:
            self.meeting = Meeting(host, sock.getsockname()[1], backend)
            self._store: Store | None = TCPStore(
                host,
                self.meeting.port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=_given_away(sock),
            )

    def pair(self, worker: int, generation: int, deadline: float | None) -> Callable[[], Pair]:
        """What forms a group with a worker, who calls ``Meeting.join`` meanwhile; RuntimeError if it does not in time.

        It is a client of its own: one that waits in vain delays no other, and ends with the store.
        """
        return self.meeting.begin(0, (worker, generation), deadline)

    def close(self) -> None:
        """Close the store; harmless when repeated."""
        if os.getpid() != self._pid and self._store is not None:
            _inherited.append(self._store)
        self._store = None


def _given_away(sock: socket.socket) -> int:
    """A descriptor that its receiver closes."""
    return sock.dup().detach()


def _address_towards(host: str, port: int) -> str:
    """The address of this machine by which ``host`` reaches it."""
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as sock:
        sock.connect(where)  # sends nothing
        return sock.getsockname()[0]


def _form(store: Any, backend: str, name: tuple[int, int], rank: int, host: str, deadline: float | None) -> Pair:
    apart = PrefixStore("wsync/{}/{}".format(*name), store)
    apart.set_timeout(time_until(deadline))
    if backend == "nccl":
        from torch.distributed import ProcessGroupNCCL  # only builds for CUDA have it

        return Pair(ProcessGroupNCCL(apart, rank, 2, ProcessGroupNCCL.Options()), 1 - rank)
    options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._threads = 1  # sends and receives need none
    options._timeout = time_until(deadline)
    return Pair(ProcessGroupGloo(apart, rank, 2, options), 1 - rank)
