"""Buffers: memory for one version of packed weights. Copying into one is the only step that touches every byte."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wsync.native import native
from wsync.weights.layout import Layout
from wsync.weights.snapshot import snapshot
from wsync.weights.tensors import copy_all, zeros


class Buffer:
    """A lease on memory for one version: a slot of the arena, or memory of a pool.

    The memory is not reused as long as the object exists: whatever reads the bytes or the views keeps the buffer.

    Attributes:
        layout: the layout of the weights.
        flat: all of it, ``uint8[nbytes]``.
        views: one tensor per entry of the layout.
        slot: its index in the arena; -1 in private memory.
        plan: the ``native.PackPlan`` of the views; None without the C extension. PyTorch's copy of a small tensor costs
            more in calls than in bytes; that of a large one first loads the cache lines that it overwrites.
    """

    __slots__ = ("__weakref__", "flat", "layout", "plan", "slot", "views")

    def __init__(self, layout: Layout, flat: Tensor, views: Sequence[Tensor], slot: int, plan: Any) -> None:
        self.layout = layout
        self.flat = flat
        self.views = views
        self.slot = slot
        self.plan = plan

    @classmethod
    def new(cls, layout: Layout, device: torch.device | str = "cpu") -> Buffer:
        """Return a buffer in private memory."""
        flat = zeros(layout.nbytes, device)
        views = layout.views(flat)
        return cls(layout, flat, views, -1, None if native is None else native.PackPlan(views, False))

    @property
    def memory(self) -> memoryview:
        """The bytes; of a buffer on a GPU, a copy of them."""
        return self.flat.numpy(force=True).data

    def pack(self, tensors: Any) -> bool:
        """Copy weights into this buffer; False: the module of a ``TensorTree`` has changed, and nothing was copied.

        ``tensors`` are a list in the layout's order, or what ``Source.usual`` returned. LayoutMismatch: no fit.
        """
        given = tensors if type(tensors) is list else tensors.tensors()
        if given is None:
            return False
        if self.plan is not None and self.plan.fill(given, given is not tensors):
            return True
        self.layout.check(given)  # not plain bytes in main memory: PyTorch would convert what does not fit
        leaders = self.layout.leaders
        copy_all([self.views[i] for i in leaders], [given[i] for i in leaders])
        return True


class BufferPool:
    """Private memory for versions of one layout at a time, reused once no buffer over it exists. Not thread-safe."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._layout: Layout | None = None
        self._free: list[tuple[Tensor, Sequence[Tensor], int, Any]] = []

    def reserve(self, layout: Layout) -> Buffer:
        """Return a buffer that nobody else has."""
        if self._layout is not layout:
            self._free, self._layout = [], layout
        buffer = Buffer(layout, *self._free.pop()) if self._free else Buffer.new(layout, self._device)
        memory = buffer.flat, buffer.views, buffer.slot, buffer.plan
        weakref.finalize(buffer, self._free.append, memory).atexit = False
        return buffer


def packed(weights: Any) -> tuple[Layout, Buffer]:
    """Return the layout of ``weights`` (a module, a TensorDict or a state dict), and a new buffer with them."""
    given = snapshot(weights)
    layout = Layout.of(given)
    buffer = Buffer.new(layout)
    buffer.pack(layout.order(given))
    return layout, buffer
