"""Copying weights into a buffer: the one step of an update that touches every byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wsync import native
from wsync.weights.layout import Layout, copy_all


@dataclass(frozen=True, slots=True)
class Buffer:
    """Room for one version, lent by a sender's end until it is published or dropped.

    Attributes:
        flat: all of it, ``uint8[nbytes]``.
        views: one tensor per entry of the layout, to be packed into.
        slot: what the end knows it by.
        room: fills the views with plain bytes, if there is a fast path: to ask PyTorch for a copy of a small tensor
            costs more than the copy, and of a large one fetches what it overwrites.
        address: where ``flat`` lay when this was made.
    """

    flat: Tensor
    views: Sequence[Tensor]
    slot: int = -1
    room: native.Room | None = None
    address: int = 0

    @property
    def moved(self) -> bool:
        """Whether its tensors lie elsewhere by now: PyTorch moves what it is to share with another process."""
        return self.flat.data_ptr() != self.address

    @classmethod
    def over(cls, layout: Layout, flat: Tensor, slot: int = -1, *, shared: bool = False) -> Buffer:
        """The flat buffer ``uint8[nbytes]`` as room for weights of ``layout``; ``shared`` with other processes."""
        views = layout.views(flat)
        return cls(flat, views, slot, native.room(views, shared=shared), flat.data_ptr())


class Packer:
    """Copies weights of one layout into buffers.

    Args:
        layout: of the weights.
    """

    def __init__(self, layout: Layout) -> None:
        followers = {follower for follower, _ in layout.ties}
        self._leaders = [index for index in range(len(layout.names)) if index not in followers]
        self._tied = bool(followers)

    def pack(self, tensors: list[Tensor], buffer: Buffer) -> None:
        """Copy ``tensors`` (in the layout's order, and checked) into ``buffer``."""
        if buffer.room is not None and buffer.room.fill(tensors):
            return
        views = buffer.views
        if self._tied:
            tensors, views = [tensors[i] for i in self._leaders], [views[i] for i in self._leaders]
        with torch.no_grad():
            copy_all(list(views), list(tensors))
