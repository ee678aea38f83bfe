"""A pair of ranks, a trainer and one worker, and the ``torch.distributed`` group in which weights go between them."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from wsync.deadlines import remaining
from wsync.network.pair import Work

_FOREVER = timedelta(days=365)


# Stores and groups that a fork has copied: their threads are the parent's, so they can neither be used nor taken down.
inherited: list[Any] = []


# By groups of users': what was sent there, and had not been taken yet when the line was closed.
_untaken: WeakKeyDictionary[Any, list[Work]] = WeakKeyDictionary()


class GroupPair:
    """Either end of a line of tensors in a group (``Outgoing`` and ``Incoming``).

    Args:
        group: has both ends in it.
        other: the other end's rank there.
        tag: of every message.
    """

    in_memory = False

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

    def receive(self, flat: Tensor, works: list[Work]) -> None:
        """Begin to receive into ``flat``, and add the transfer to ``works``; likewise."""
        works.extend(map(self._group.recv, [[flat]], [self._other], [self._tag]))

    def pointed(self) -> bool:
        """Nobody can see that."""
        return False

    def close(self, under_way: Work | None = None) -> bool:
        """Let go of the group; what is ``under_way`` in a group of our own ends with it, but not in a forked child.

        Returns:
            Whether the other end can take what is ``under_way`` later.
        """
        if os.getpid() != self._pid:
            inherited.append(self._group)
        self._group = None
        return False


class UsersPair(GroupPair):
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
