"""Copying weights into a buffer: the one step of an update that touches every byte."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wsync import loops
from wsync.loops.tensors import copy_all
from wsync.weights import pinned
from wsync.weights.layout import Layout
from wsync.weights.snapshot import snapshot


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory for one version: a slot of the arena, or a buffer of a pool.

    Attributes:
        layout: the layout of the weights.
        flat: all of it, ``uint8[nbytes]``.
        views: one tensor per entry of the layout, to be packed into.
        slot: its index in the arena or the pool.
        plan: copies plain bytes into the views. PyTorch's copy of a small tensor costs more in calls than in bytes;
            that of a large one first loads the cache lines that it overwrites.
        address: the address of ``flat`` when this was made.
    """

    layout: Layout
    flat: Tensor
    views: Sequence[Tensor]
    slot: int
    plan: loops.PackPlan
    address: int

    @property
    def moved(self) -> bool:
        """Whether its tensors lie elsewhere by now: PyTorch moves what it is to share with another process."""
        return self.flat.data_ptr() != self.address

    @classmethod
    def over(cls, layout: Layout, flat: Tensor, slot: int = -1, *, shared: bool = False) -> Buffer:
        """The flat buffer ``uint8[nbytes]`` as room for weights of ``layout``; ``shared`` with other processes."""
        views = layout.views(flat)
        return cls(layout, flat, views, slot, loops.PackPlan(views, shared), flat.data_ptr())

    @classmethod
    def new(cls, layout: Layout, slot: int = -1, device: torch.device | str = "cpu") -> Buffer:
        """Return a buffer in private memory."""
        with torch.inference_mode(False):  # views of an inference tensor are inference tensors
            if torch.device(device).type == "cpu":
                flat = pinned.zeros(layout.nbytes)
            else:
                flat = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        return cls.over(layout, flat, slot)

    def pack(self, tensors: Sequence[Tensor]) -> None:
        """Copy ``tensors`` (in the layout's order, and checked) into this buffer."""
        if self.plan.fill(tensors):
            return
        views, layout = self.views, self.layout
        if layout.ties:
            tensors, views = [tensors[i] for i in layout.leaders], [views[i] for i in layout.leaders]
        copy_all(views, tensors)


class BufferPool:
    """Private buffers of one layout; a new one is made when all others are in use. Not thread-safe.

    Those of another layout are left to what still uses them.

    Args:
        device: where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Buffer] = []

    def buffer(self, layout: Layout, busy: Container[int]) -> Buffer:
        """Return a buffer with a ``slot`` that is not in ``busy``."""
        if self._buffers and self._buffers[0].layout is not layout:
            self._buffers.clear()
        for buffer in self._buffers:
            if buffer.slot not in busy:
                return buffer
        self._buffers.append(Buffer.new(layout, len(self._buffers), self._device))
        return self._buffers[-1]

    def at(self, slot: int) -> Buffer:
        """Return the buffer with that ``slot``."""
        return self._buffers[slot]

    def clear(self) -> None:
        """Release the memory."""
        self._buffers.clear()


def packed(weights: Any) -> tuple[Layout, Buffer]:
    """Return the layout of ``weights`` (a module, a TensorDict or a state dict), and a new buffer with them.

    Raises:
        LayoutMismatch: see ``Layout.of``.
    """
    given = snapshot(weights)
    layout = Layout.of(given)
    buffer = Buffer.new(layout)
    buffer.pack(layout.order(given))
    return layout, buffer
