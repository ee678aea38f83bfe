"""How batches come from several workers: all together, or whoever is first."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Protocol

import torch
from tensordict import TensorDictBase

from collectors.pool import Pool


class Gathering(Protocol):
    """A way of gathering."""

    buffers: ClassVar[int]
    """Batches of a worker that can be underway."""

    def share(self, frames: int, workers: int) -> int:
        """The frames of a batch that each worker gathers."""
        ...

    def gather(self, pool: Pool[Any]) -> TensorDictBase:
        """One batch, in memory that nobody writes again."""
        ...


class Together:
    """All workers gather their share of a batch, and then wait: a batch is of one version.

    Args:
        cat_results: how the shares are joined: along a dimension, or ``"stack"`` with a new leading one.

    Raises:
        ValueError: another ``cat_results``.
    """

    buffers: ClassVar[int] = 1

    def __init__(self, cat_results: int | Literal["stack"]) -> None:
        if cat_results != "stack" and not isinstance(cat_results, int):
            raise ValueError(f"cat_results is a dimension or 'stack', not {cat_results!r}")
        self._how: Any = cat_results

    def share(self, frames: int, workers: int) -> int:
        """The rounded-up share."""
        return -(-frames // workers)

    def gather(self, pool: Pool[Any]) -> TensorDictBase:
        """See Gathering."""
        pool.tell(pool.workers, "collect", 0)
        batches: Any = [worker.batches[index] for worker, index in pool.hear_all("batch")]
        joined: Any = torch.stack(batches) if self._how == "stack" else torch.cat(batches, self._how)
        return joined


class FirstCome:
    """Workers go on while the trainer learns; a batch is the next one that any worker has finished."""

    buffers: ClassVar[int] = 2  # one is being filled while the other waits to be taken

    def __init__(self) -> None:
        self._underway = False

    def share(self, frames: int, workers: int) -> int:
        """All of them: a batch is one worker's."""
        return frames

    def gather(self, pool: Pool[Any]) -> TensorDictBase:
        """See Gathering."""
        if not self._underway:
            self._underway = True
            for buffer in range(self.buffers):
                pool.tell(pool.workers, "collect", buffer)
        worker, buffer = pool.hear("batch", pool.workers)
        batch: Any = worker.batches[buffer]
        batch = batch.clone()
        pool.tell([worker], "collect", buffer)
        return batch
