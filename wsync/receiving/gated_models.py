"""The gated models of this process with their updaters, and what happens to them when the process forks."""

from __future__ import annotations

import os
from typing import Any
from weakref import WeakSet

from wsync.gate import MixedWeightsGuard, gate_model, process_gate, ungate_model, without_forward
from wsync.receiving.updating import ModelUpdater

# Changed inside the gate only; the fork hooks below also read it outside.
_updaters: WeakSet[ModelUpdater] = WeakSet()
_locked_for_fork: list[Any] = []  # the gate's lock, from before a fork until after it; else empty
_not_copied: WeakSet[ModelUpdater] = WeakSet()  # at a fork: those with models that are still bound to shared memory

_MIXED = "this process was forked when its model could not be copied (see the error before): use a new model here"


def add(updater: ModelUpdater) -> None:
    """Gate the model of ``updater``.

    Called inside the gate, so that ``remove`` of another updater of the model does not come between the two steps.
    """
    if updater.destination.module is not None:
        gate_model(updater.destination.module)
    _updaters.add(updater)


def remove(updater: ModelUpdater) -> None:
    """Undo ``add``; the model stays gated while it has another updater. Called inside the gate."""
    _updaters.discard(updater)
    module = updater.destination.module
    if module is not None and all(other.destination.module is not module for other in _updaters):
        ungate_model(module)


# --- called in the forking thread; after the fork in the parent and in the child


def _copy_to_own_memory() -> None:
    for updater in _updaters:
        updater.copy_to_own_memory()
        _not_copied.discard(updater)


def _before_fork() -> None:
    """Copy all models into memory of their own: the sender will write the slots that they are bound to.

    Python prints what this raises, a lack of memory or Ctrl-C, and forks all the same.
    """
    if _updaters:
        _not_copied.update(_updaters)
        gate_state = process_gate().gate_state
        gate_state.lock.acquire()
        _locked_for_fork.append(gate_state)
        with without_forward():
            gate_state.call(_copy_to_own_memory)


def _after_in_parent() -> None:
    _not_copied.clear()
    if _locked_for_fork:
        _locked_for_fork.pop().lock.release()


def _after_in_child() -> None:
    """Close all updaters: the child has a gate of its own, and no connection.

    A child forked inside a forward leaves the parent's gate object when that forward ends. The hooks are removed from
    it here, so nothing is reported to the sender.
    """
    if _locked_for_fork:
        gate_state = _locked_for_fork.pop()
        gate_state.hooks = ()
        gate_state.lock.release()
    for updater in _not_copied:
        MixedWeightsGuard(updater.destination.model).set(_MIXED)
    _not_copied.clear()
    for updater in _updaters:
        updater.state.close_in_forked_child()
    _updaters.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
