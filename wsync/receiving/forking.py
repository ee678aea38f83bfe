"""The receivers of this process, and what happens to their models when the process forks."""

from __future__ import annotations

import os
from typing import Any, Protocol
from weakref import WeakSet

from wsync.control.receiver_thread import without_waiting_for_versions
from wsync.gate import process_gate
from wsync.weights.targets import Destination


class GatedReceiver(Protocol):
    """A ``Receiver``, as a fork needs it.

    Attributes:
        destination: has the gated model.
    """

    destination: Destination

    def copy_to_own_memory(self) -> None:
        """Copy the model into memory of its own until the next update. Called inside the gate, before a fork."""
        ...

    def end_in_forked_child(self) -> None:
        """Process nothing more: the connection belongs to the parent. Called once, in the forked child."""
        ...


gated_receivers: WeakSet[GatedReceiver] = WeakSet()
"""The receivers of this process. Changed inside the gate only; the functions below also read it outside."""
_locked_for_fork: list[Any] = []  # the gate's lock, from before a fork until after it; else empty


def _own_memory() -> None:
    for receiver in gated_receivers:
        receiver.copy_to_own_memory()


def _before_fork() -> None:
    """Copy all models into memory of their own: the sender will write the slots that they are bound to."""
    if gated_receivers:
        gate_lock = process_gate().gate_lock
        gate_lock.lock.acquire()
        _locked_for_fork.append(gate_lock)
        with without_waiting_for_versions():
            gate_lock.call(_own_memory)


def _after_in_parent() -> None:
    if _locked_for_fork:
        _locked_for_fork.pop().lock.release()


def _after_in_child() -> None:
    """End all receivers: the child has a gate of its own, and no connection.

    A child that was forked inside a forward still leaves its copy of the parent's gate. That copy has no hooks, so the
    end of the forward is not reported to the sender.
    """
    if _locked_for_fork:
        gate_lock = _locked_for_fork.pop()
        gate_lock.hooks = ()
        gate_lock.lock.release()
    for receiver in gated_receivers:
        receiver.end_in_forked_child()
    gated_receivers.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
