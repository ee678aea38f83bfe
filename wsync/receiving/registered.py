"""Keeping a worker's model bound to the buffers that the user has registered: see ``wsync/shm/registered.py``."""

from __future__ import annotations

from typing import Protocol

import torch

from wsync.shm.registered import RegisteredView
from wsync.weights.binding import Binding


class BoundReceiver(Protocol):
    """A receiver, as ``RegisteredBufferBinder`` needs it."""

    @property
    def version(self) -> int:
        """The version that the model has."""
        ...

    @property
    def binding(self) -> Binding | None:
        """How the model takes updates; None before the first."""
        ...


class RegisteredBufferBinder:
    """Binds a model to the registered buffers while these have the model's version.

    Implements ``wsync.loops.gate_lock.GateHook``; called after the hook that installs updates.

    Args:
        memory: the buffers.
        receiver: of the model.
    """

    def __init__(self, memory: RegisteredView, receiver: BoundReceiver) -> None:
        self._memory = memory
        self._receiver = receiver
        self._left_at_version = 0  # the model has weights of its own while it has this version

    def poll_update(self) -> bool:
        """See ``GateHook``. The buffers may have been changed in place, so autocast's casts of them are dropped."""
        version, binding = self._receiver.version, self._receiver.binding
        if version and version == self._memory.version and version != self._left_at_version and binding is not None:
            binding.rebind(self._memory.tensors)
            torch.clear_autocast_cache()
        return False

    def leaving_gate(self) -> None:
        """See ``GateHook``."""

    def leave_until_next_version(self) -> None:
        """Leave the model unbound until it has another version: the worker has applied weights of its own.

        Called inside the gate.
        """
        self._left_at_version = self._receiver.version
