"""Buffers: memory for one version of packed weights. Copying into one is the only step that touches every byte."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from wsync.native import native
from wsync.weights.layout import Layout
from wsync.weights.snapshot import snapshot
from wsync.weights.tensors import copy_all, zeros

_POOL_ALONE = 2  # references: the pool's list, and the argument of ``getrefcount``


class Buffer(msgspec.Struct, eq=False):
    """A lease on memory for one version: a slot of the arena, or memory of a pool.

    The memory is not reused until the last reference to the buffer is dropped: a reader of its bytes or views keeps it.

    Attributes:
        flat: all of it, ``uint8[nbytes]``; ``views``: one tensor per entry of the layout.
        slot: its index in the arena, where other processes read it; -1 in private memory.
        plan: the ``native.PackPlan`` of the views; None without the C extension. PyTorch's copy of a small tensor costs
            more in calls than in bytes; that of a large one first loads the cache lines that it overwrites.
        formatted: the views as a ``TransportBackend`` is given them, once it was.
    """

    layout: Layout
    flat: Tensor
    views: Sequence[Tensor]
    slot: int
    plan: Any
    formatted: Any = None

    @classmethod
    def over(cls, layout: Layout, flat: Tensor, slot: int = -1) -> Buffer:
        views = layout.views(flat)
        return cls(layout, flat, views, slot, None if native is None else native.PackPlan(views, slot >= 0))

    @classmethod
    def new(cls, layout: Layout, device: torch.device | str = "cpu") -> Buffer:
        return cls.over(layout, zeros(layout.nbytes, device))

    @property
    def memory(self) -> memoryview:
        """The bytes; of a buffer on a GPU, a copy of them."""
        return self.flat.numpy(force=True).data

    def pack(self, tensors: Any) -> bool:
        """Copy weights into this buffer; False: the module of a ``TensorTree`` has changed, and nothing was copied.

        ``tensors`` are a list in the layout's order, or what ``Source.usual`` returned. LayoutMismatch: no fit.
        """
        filled = False if self.plan is None else self.plan.fill(tensors)
        if filled is not False:
            return filled is True
        given = tensors if isinstance(tensors, list) else tensors.tensors()
        if given is None:
            return False
        self.layout.check(given)  # not plain bytes in main memory: PyTorch would convert what does not fit
        leaders = self.layout.leaders
        copy_all([self.views[i] for i in leaders], [given[i] for i in leaders])
        return True


class BufferPool:
    """Private memory for versions of one layout at a time. A buffer is free while only the pool refers to it."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._layout: Layout | None = None
        self._buffers: list[Buffer] = []

    def reserve(self, layout: Layout) -> Buffer:
        """Return a free buffer. Not thread-safe."""
        if self._layout is not layout:
            self._buffers, self._layout = [], layout
        for index in range(len(self._buffers)):
            if sys.getrefcount(self._buffers[index]) == _POOL_ALONE:
                return self._buffers[index]
        self._buffers.append(Buffer.new(layout, self._device))
        return self._buffers[-1]


def packed(weights: Any) -> tuple[Layout, Buffer]:
    """Return the layout of ``weights`` (a module, a TensorDict or a state dict), and a new buffer with them."""
    given = snapshot(weights)
    layout = Layout.of(given)
    buffer = Buffer.new(layout)
    buffer.pack(layout.order(given))
    return layout, buffer
