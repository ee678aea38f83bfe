"""The receivers of this process, and what becomes of their models when the process forks."""

from __future__ import annotations

import os
from typing import Any, Protocol
from weakref import WeakSet

from wsync.gate import process_gate
from wsync.weights.targets import Destination


class GatedReceiver(Protocol):
    """A receiver with a gated model.

    Attributes:
        destination: has the model.
    """

    destination: Destination

    def copy_to_own_memory(self) -> None:
        """Give the model memory of its own until the next update. Called inside the gate, before a fork."""
        ...

    def end_in_forked_child(self) -> None:
        """Process nothing more: the connection is the parent's. Called once, in the forked child."""
        ...


gated_receivers: WeakSet[GatedReceiver] = WeakSet()
"""Those of this process. Used by the holder of the gate only."""
_held: list[Any] = []  # the gate's lock, while this process forks


def _own_memory() -> None:
    for receiver in gated_receivers:
        receiver.copy_to_own_memory()


def _before_fork() -> None:
    """Give all models memory of their own: the slots that they are bound to will be written by the sender."""
    if gated_receivers:
        gate_lock = process_gate().gate_lock
        gate_lock.lock.acquire()
        _held.append(gate_lock)
        gate_lock.call(_own_memory)


def _after_in_parent() -> None:
    if _held:
        _held.pop().lock.release()


def _after_in_child() -> None:
    """End all receivers: the child has a gate of its own, and no connection.

    A child that was forked inside a forward also leaves its parent's gate, and must not report that to the sender.
    """
    if _held:
        gate_lock = _held.pop()
        gate_lock.feeds = ()
        gate_lock.lock.release()
    for receiver in gated_receivers:
        receiver.end_in_forked_child()
    gated_receivers.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
