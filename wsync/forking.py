"""The models that follow a sender in this process, and what becomes of them when it forks."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Protocol
from weakref import WeakSet

from torch import nn

from wsync.gate import process_gate


class Follows(Protocol):
    """Whose model follows a sender.

    Attributes:
        model: it is gated.
    """

    model: nn.Module

    def own_memory(self) -> None:
        """Give the model memory of its own until the next update."""
        ...


following: WeakSet[Follows] = WeakSet()
"""Who does, in this process. Only the holder of the gate touches it."""
_holding: list[AbstractContextManager[None]] = []  # the gate, while this process forks


def _before() -> None:
    """Give all models memory of their own: what they are bound to is written once this process has gone on."""
    if following:
        gate = process_gate().hold()
        gate.__enter__()
        _holding.append(gate)
        for one in following:
            one.own_memory()


def _in_parent() -> None:
    if _holding:
        _holding.pop().__exit__(None, None, None)


def _in_child() -> None:
    """A child's models follow nobody, and it has a gate of its own."""
    following.clear()
    _holding.clear()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
