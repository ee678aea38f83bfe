"""A batch as one flat buffer: planned once, then written and read through views, and never pickled."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase

_ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class BatchPlan:
    """Where each tensor of a batch lies: ``(key, dtype, shape, offset in bytes)``; small enough to send."""

    columns: tuple[tuple[tuple[str, ...], torch.dtype, torch.Size, int], ...]
    batch_size: torch.Size
    nbytes: int

    @classmethod
    def of(cls, batch: TensorDictBase) -> BatchPlan:
        """The plan of ``batch``."""
        columns, end = [], 0
        for key, value in batch.items(include_nested=True, leaves_only=True):
            columns.append(((key,) if isinstance(key, str) else key, value.dtype, value.shape, end))
            end += -(-value.numel() * value.element_size() // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(columns), batch.batch_size, max(end, _ALIGNMENT))

    def share(self, count: int) -> int:
        """An anonymous memory file for ``count`` batches; its descriptor."""
        fd = os.memfd_create("wsync-batches", os.MFD_CLOEXEC)
        os.posix_fallocate(fd, 0, self.nbytes * count)
        return fd

    def map(self, fd: int, count: int) -> list[torch.Tensor]:
        """The buffers in a memory file, and the file closed: the memory goes with the last of them."""
        memory = torch.frombuffer(mmap.mmap(fd, self.nbytes * count), dtype=torch.uint8)
        os.close(fd)
        return list(memory.view(count, self.nbytes).unbind())

    def allocate(self, count: int) -> list[torch.Tensor]:
        """Buffers for ``count`` batches in this process's own memory."""
        return list(torch.zeros(count, self.nbytes, dtype=torch.uint8).unbind())

    def view(self, buffer: torch.Tensor) -> TensorDict:
        """The batch that lies in ``buffer``, uint8 ``[nbytes]``, without a copy."""
        batch = TensorDict({}, self.batch_size)
        for key, dtype, shape, offset in self.columns:
            nbytes = shape.numel() * dtype.itemsize
            batch.set(key, buffer[offset : offset + nbytes].view(dtype).view(shape))
        return batch
