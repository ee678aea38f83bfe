"""Joins the batches of several workers into one, in memory that no worker writes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDict

from collectors.workers.pool import WorkerHandle

How = int | Literal["stack"]
"""Along a dimension of the batches (negative: counted from their last one), or with a new leading dimension."""


class Joiner:
    """Joins one batch of each of a fixed list of workers; used for every round of the same workers.

    The result is what ``torch.stack`` or ``torch.cat`` of the TensorDicts gives. So that little is left to do when the
    last worker is ready, ``begin`` allocates while the workers collect, and each batch is copied when it arrives.

    Args:
        workers: in the order in which their batches are joined; the batches are those of buffer 0.
        how: see ``How``.

    Raises:
        IndexError, RuntimeError: the batches cannot be joined.
    """

    def __init__(self, workers: Sequence[WorkerHandle], how: How) -> None:
        self.workers = list(workers)
        batches = [worker.batches[0] for worker in self.workers]
        joined = join([batch.to("meta") for batch in batches], how)
        self._size = joined.batch_size
        self._leaves = [(key, leaf.shape, leaf.dtype) for key, leaf in joined.items(True, True)]
        self._sources = [[batch.get(key) for key, *_ in self._leaves] for batch in batches]
        self._dim = how if isinstance(how, str) or how >= 0 else how + len(self._size)

    def begin(self) -> JoinedBatch:
        """Allocate the memory of one joined batch."""
        tensors = [torch.empty(shape, dtype=dtype) for _, shape, dtype in self._leaves]
        batch = TensorDict({}, self._size)
        for (key, *_), tensor in zip(self._leaves, tensors, strict=True):
            batch.set(key, tensor)
        parts = [self._parts(index, tensor) for index, tensor in enumerate(tensors)]
        targets = zip(*parts, strict=True)  # by worker
        return JoinedBatch(batch, dict(zip(self.workers, zip(targets, self._sources, strict=True), strict=True)))

    def _parts(self, leaf: int, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the part of ``tensor`` that each worker's batch is copied to."""
        if isinstance(self._dim, str):
            return tensor.unbind()
        return tensor.split([sources[leaf].shape[self._dim] for sources in self._sources], self._dim)


class JoinedBatch:
    """A batch that becomes complete as the workers' batches arrive.

    Attributes:
        batch: the joined batch; complete when ``add`` was called for each worker.
    """

    def __init__(
        self, batch: TensorDict, copies: dict[WorkerHandle, tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]
    ) -> None:
        self.batch = batch
        self._copies = copies

    def add(self, worker: WorkerHandle) -> None:
        """Copy the batch of ``worker``, in place of an earlier one of the same worker."""
        for target, source in zip(*self._copies[worker], strict=True):
            target.copy_(source)


def join(batches: Sequence[Any], how: How) -> Any:
    """Return tensors or TensorDicts joined in new memory.

    Raises:
        IndexError, RuntimeError: they cannot be joined.
    """
    return torch.stack(list(batches)) if how == "stack" else torch.cat(list(batches), how)
