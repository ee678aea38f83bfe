"""The buffers that updates are packed into: slots of the arena, or private memory if there is no arena."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from wsync.sending.slots import Slots
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer, BufferPool


class Buffers:
    """Reserves buffers, and has the one that all workers were sent last. Used under the channel's lock.

    Args:
        slots: of the arena; None if there is none.
        device: of private buffers.
    """

    def __init__(self, slots: Slots | None, device: torch.device) -> None:
        self._slots = slots
        self._pool = BufferPool(device)
        self._reserved: set[int] = set()
        # The last update to all workers outside the fast path; None if a later one went to some of them.
        self._newest: Buffer | None = None

    @property
    def in_use(self) -> bool:
        """Whether a buffer is reserved: an update is being packed, or prepared."""
        return bool(self._reserved)

    def reserve(self, layout: Layout, busy: set[int], deadline: float | None) -> Buffer:
        """Return a buffer with a slot that is not in ``busy``: see ``SendChannel.reserve``."""
        busy = busy | self._reserved
        buffer = self._pool.buffer(layout, busy) if self._slots is None else self._slots.reserve(busy, deadline)
        self._reserved.add(buffer.slot)
        return buffer

    def release(self, buffers: Iterable[Buffer]) -> None:
        """End reservations."""
        self._reserved.difference_update(buffer.slot for buffer in buffers)

    def set_newest(self, buffer: Buffer | None) -> None:
        """Record the buffer that all workers were sent last; None if there is no such buffer any more."""
        self._newest = buffer

    def newest_views(self) -> Sequence[Tensor] | None:
        """See ``SendChannel``."""
        if self._newest is None:
            return None
        if self._slots is None:
            return self._newest.views
        published = self._slots.arena.published_slots()
        return self._slots.arena.buffer(published[0]).views if len(published) == 1 else None

    def clear(self) -> None:
        """Release all buffers. The arena is closed by its owner."""
        self._newest = self._slots = None  # they keep the arena's mapping, and with it a descriptor
        self._pool.clear()
