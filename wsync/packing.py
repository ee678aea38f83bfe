"""Copying weights into a buffer: the one step of an update that touches every byte."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wsync.layout import Layout, copy_all

_SMALL = 2 << 20  # bytes: above, PyTorch's own copies are as fast, and may use several threads
_PLAIN_TYPES = (nn.Parameter, Tensor)  # a subclass may keep its numbers elsewhere


@dataclass(frozen=True, slots=True)
class Buffer:
    """Room for one version, lent by a sender's end until it is published or dropped.

    Attributes:
        flat: all of it, ``uint8[nbytes]``.
        views: one tensor per entry of the layout, to be packed into.
        slot: what the end knows it by.
        windows: the bytes of each view, where they can be written one by one; else nothing.
    """

    flat: Tensor
    views: Sequence[Tensor]
    slot: int = -1
    windows: Sequence[memoryview] = ()

    @classmethod
    def over(cls, layout: Layout, flat: Tensor, slot: int = -1) -> Buffer:
        """The flat buffer ``uint8[nbytes]`` as room for weights of ``layout``."""
        small = flat.is_cpu and layout.nbytes <= _SMALL and layout.contiguous
        windows = [_window(flat.data_ptr() + offset, nbytes) for offset, nbytes in layout.places] if small else ()
        return cls(flat, layout.views(flat), slot, windows)


class Packer:
    """Copies weights of one layout into buffers.

    To ask PyTorch for a copy of a small tensor costs more than the copy. So small models are copied as plain bytes,
    from where their tensors lie at that moment.

    Args:
        layout: of the weights.
    """

    def __init__(self, layout: Layout) -> None:
        followers = {follower for follower, _ in layout.ties}
        self._leaders = [index for index in range(len(layout.names)) if index not in followers]
        self._tied = bool(followers)
        self._addresses = [0] * len(layout.names)
        self._sources = [memoryview(b"")] * len(layout.names)

    def pack(self, tensors: Sequence[Tensor], buffer: Buffer) -> None:
        """Copy ``tensors`` (in the layout's order, and checked) into ``buffer``."""
        if buffer.windows and self._copy_bytes(tensors, buffer.windows):
            return
        views = buffer.views
        if self._tied:
            tensors, views = [tensors[i] for i in self._leaders], [views[i] for i in self._leaders]
        with torch.no_grad():
            copy_all(list(views), list(tensors))

    def _copy_bytes(self, tensors: Sequence[Tensor], windows: Sequence[memoryview]) -> bool:
        """Copy plain bytes; False if some tensor is not just the bytes at its address."""
        addresses, sources = self._addresses, self._sources
        for i, tensor in enumerate(tensors):
            if type(tensor) not in _PLAIN_TYPES or not tensor.is_contiguous() or tensor.is_neg():
                return False
            address = tensor.data_ptr()
            if address != addresses[i]:
                if not tensor.is_cpu or not address:
                    return False
                addresses[i], sources[i] = address, _window(address, len(windows[i]))
            windows[i][:] = sources[i]
        return True


def _window(address: int, nbytes: int) -> memoryview:
    """The bytes at an address of this process. Keeps nothing alive: the memory has to outlast its use."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
