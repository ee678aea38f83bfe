"""The models that follow a sender in this process, and what becomes of them when it forks."""

from __future__ import annotations

import os
from typing import Any, Protocol
from weakref import WeakSet

from torch import nn

from wsync.receiving.gate import process_gate


class Follows(Protocol):
    """Whose model follows a sender.

    Attributes:
        model: it is gated.
    """

    model: nn.Module

    def own_memory(self) -> None:
        """Give the model memory of its own until the next update."""
        ...

    def orphan(self) -> None:
        """This process is a forked child: the line is its parent's, and nothing more will come."""
        ...


following: WeakSet[Follows] = WeakSet()
"""Who does, in this process. Only the holder of the gate touches it."""
_closed: list[Any] = []  # the turnstile, while this process forks


def _own_memory() -> None:
    for one in following:
        one.own_memory()


def _before() -> None:
    """Give all models memory of their own: what they are bound to is written once this process has gone on."""
    if following:
        turnstile = process_gate().turnstile
        turnstile.lock.acquire()
        _closed.append(turnstile)
        turnstile.call(_own_memory)


def _in_parent() -> None:
    if _closed:
        _closed.pop().lock.release()


def _in_child() -> None:
    """A child's models follow nobody, and it has a gate of its own.

    If it was forked inside a forward it leaves its parent's gate as well, and must not tell the sender of that.
    """
    if _closed:
        turnstile = _closed.pop()
        turnstile.feeds = ()
        turnstile.lock.release()
    for one in following:
        one.orphan()
    following.clear()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
