"""Keeping a worker's model bound to the buffers that the user has registered: see ``wsync/shm/registered.py``."""

from __future__ import annotations

import torch

from wsync.receiving.updating import ModelUpdater
from wsync.shm.registered import RegisteredView


class RegisteredBufferBinder:
    """Binds a model to the registered buffers while these have the model's version.

    Implements ``wsync.loops.gate_lock.GateHook``: all methods are called inside the gate, after those of the hook that
    installs updates.

    Args:
        memory: the buffers.
        updater: of the model.
    """

    def __init__(self, memory: RegisteredView, updater: ModelUpdater) -> None:
        self._memory = memory
        self._updater = updater

    def poll_update(self) -> bool:
        """See ``GateHook``. The buffers may have been changed in place, so autocast's casts of them are dropped."""
        updater = self._updater
        version, binding = updater.version, updater.binding
        if version and version == self._memory.version != updater.unbound_at_version and binding is not None:
            binding.rebind(self._memory.tensors)
            torch.clear_autocast_cache()
        return False

    def leaving_gate(self) -> None:
        """See ``GateHook``."""
