"""The layout of a batch in a flat buffer, of which it is a view that is never pickled; and how many frames it has."""

from __future__ import annotations

import mmap
import os
import warnings
from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase

from collectors.errors import level_of_caller

_ALIGNMENT = 64  # bytes


def frames_of(batch: TensorDictBase) -> int:
    """Return the number of environment steps in ``batch``: all elements, or those at which its "mask" is true."""
    mask = batch.get("mask", None)
    return batch.numel() if mask is None else int(mask.sum())


def warn_if_rounded(frames_per_batch: int, *shares: int) -> None:
    """Warn if the ``shares`` of the workers, in whole steps of their environments, have more rows than asked for."""
    if (rows := sum(shares)) != frames_per_batch:
        several = f"{len(shares)} × {shares[0]}" if len({*shares}) == 1 else " + ".join(map(str, shares))
        warnings.warn(
            f"frames_per_batch={frames_per_batch} is rounded up to {f'{several} = ' if len(shares) > 1 else ''}{rows}: "
            "a worker's share is a whole number of steps of all its environments",
            stacklevel=level_of_caller(),
        )


@dataclass(frozen=True)
class BatchLayout:
    """Where each tensor of a batch lies in its buffer, of ``nbytes`` bytes."""

    columns: tuple[tuple[tuple[str, ...], torch.dtype, torch.Size, int], ...]  # key, dtype, shape, offset in bytes
    batch_size: torch.Size
    nbytes: int

    @classmethod
    def of(cls, batch: TensorDictBase) -> BatchLayout:
        """Return the layout of ``batch``."""
        columns, end = [], 0
        for key, value in batch.items(include_nested=True, leaves_only=True):
            columns.append(((key,) if isinstance(key, str) else key, value.dtype, value.shape, end))
            end += -(-value.numel() * value.element_size() // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(columns), batch.batch_size, max(end, _ALIGNMENT))

    def create_memory(self, count: int) -> str:
        """Return the path of new anonymous memory for ``count`` batches, which lives as long as this process.

        Another process of this machine can ``open`` the path while this one lives.
        """
        fd = os.memfd_create("wsync-batches", os.MFD_CLOEXEC)
        os.posix_fallocate(fd, 0, self.nbytes * count)
        return f"/proc/{os.getpid()}/fd/{fd}"

    def buffers(self, count: int, memory: str | None) -> list[torch.Tensor]:
        """Return ``count`` buffers, which map the memory of ``create_memory``, or have memory of their own."""
        if memory is None:
            return list(torch.zeros(count, self.nbytes, dtype=torch.uint8).unbind())
        with open(memory, "r+b") as file:
            mapped = torch.frombuffer(mmap.mmap(file.fileno(), self.nbytes * count), dtype=torch.uint8)
        return list(mapped.view(count, self.nbytes).unbind())

    def view(self, buffer: torch.Tensor) -> TensorDict:
        """Return the batch in ``buffer``, ``uint8[nbytes]``, without a copy."""
        batch = TensorDict({}, self.batch_size)
        for key, dtype, shape, offset in self.columns:
            nbytes = shape.numel() * dtype.itemsize
            batch.set(key, buffer[offset : offset + nbytes].view(dtype).view(shape))
        return batch
