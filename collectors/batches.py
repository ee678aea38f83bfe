"""Batches: how many frames they have, how old these may be, and how a batch lies in a flat buffer."""

from __future__ import annotations

import mmap
import os
import warnings
from collections import Counter
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from collectors.errors import level_of_caller

_ALIGNMENT = 64  # bytes

_PATIENCE = 10  # batches of a worker that may be dropped in a row, beyond those that it has collected ahead


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
        """Return the path of new memory for ``count`` batches; others can ``open`` it while this process lives."""
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


@dataclass
class Staleness:
    """The limit of a collector, and what was dropped because of it.

    A frame's staleness is the newest version sent minus the version that acted in it; 0 for random actions.

    Attributes:
        max_staleness, run_ahead: as ``WorkerCollector``.
        dropped_batches: number of workers' batches that were dropped.
        dropped_frames: number of frames of these.
    """

    max_staleness: int | None = None
    run_ahead: int = 0
    dropped_batches: int = 0
    dropped_frames: int = 0
    _in_a_row: Counter[int] = field(default_factory=Counter)  # by worker

    def __post_init__(self) -> None:
        check_count("run_ahead", self.run_ahead)
        if self.max_staleness is not None:
            check_count("max_staleness", self.max_staleness)

    def admits(self, batch: TensorDictBase, newest: int, worker: int) -> bool:
        """Return whether ``batch`` of ``worker`` may be delivered while ``newest`` is the newest version; count it.

        Raises:
            RuntimeError: so many batches of the worker were dropped in a row that waiting for another one is useless.
        """
        if self.max_staleness is None:
            return True
        acted = batch.get("policy_version")
        if not bool(((acted >= 0) & (acted < newest - self.max_staleness)).any()):
            self._in_a_row[worker] = 0
            return True
        self.dropped_batches += 1
        self.dropped_frames += frames_of(batch)
        self._in_a_row[worker] += 1
        if self._in_a_row[worker] > _PATIENCE + self.run_ahead:
            raise RuntimeError(
                f"{self._in_a_row[worker]} batches of worker {worker} in a row had frames that were more than "
                f"max_staleness={self.max_staleness} versions old: either more versions than that are sent while one "
                "batch is collected (raise max_staleness, or lower frames_per_batch), or none are sent to this worker "
                "(worker_ids)"
            )
        return False

    def as_dict(self) -> dict[str, int | None]:
        """Return the public attributes, for a log."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


def check_count(name: str, number: Any, *, least: int = 0, otherwise: str = "") -> None:
    """Raise TypeError or ValueError unless ``number`` is a whole one from ``least`` on, or what ``otherwise`` says."""
    if not isinstance(number, Integral) or isinstance(number, bool):
        raise TypeError(f"{name} is a whole number, not {number!r}")
    if int(number) < least:
        raise ValueError(f"{name} is at least {least}{otherwise}, not {number}")
