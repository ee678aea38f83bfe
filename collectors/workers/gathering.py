"""How batches come from several workers: all together, or whoever is first."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any, ClassVar, Literal, Protocol

import torch
from tensordict import TensorDictBase

from collectors.workers.members import Members
from collectors.workers.pool import Worker


class Gathering(Protocol):
    """A way of gathering."""

    buffers: ClassVar[int]
    """Batches of a worker that can be underway."""

    def share(self, frames: int, workers: int) -> int:
        """The frames of a batch that each worker gathers."""
        ...

    def require_joinable(self, workers: Collection[Worker]) -> None:
        """The workers are ready: see that their batches can be gathered.

        Raises:
            ValueError: they cannot.
        """
        ...

    def gather(self, members: Members[Any]) -> TensorDictBase:
        """One batch, in memory that nobody writes again."""
        ...


class Together:
    """All workers gather their share of a batch, then wait: it is of one version, unless a thread updates meanwhile.

    Where a worker fails, the batch is what the others have gathered.

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
        """The rounded-up share; warns where that makes more than ``frames``."""
        share = -(-frames // workers)
        if share * workers != frames:
            warnings.warn(
                f"frames_per_batch={frames} does not divide by {workers} workers: each takes {share}, "
                f"{share * workers} in all",
                stacklevel=4,  # whoever makes the collector
            )
        return share

    def require_joinable(self, workers: Collection[Worker]) -> None:
        """See Gathering."""
        shapes = [worker.batches[0].batch_size for worker in workers]
        try:
            self._join([torch.empty(shape, device="meta") for shape in shapes])
        except (IndexError, RuntimeError) as error:
            told = ", ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise ValueError(f"cat_results={self._how!r} cannot join workers' batches of shape {told}") from error

    def _join(self, batches: Any) -> Any:
        return torch.stack(batches) if self._how == "stack" else torch.cat(batches, self._how)

    def gather(self, members: Members[Any]) -> TensorDictBase:
        """See Gathering."""
        shares: dict[Worker, TensorDictBase] = {}
        asked: list[Worker] = []
        while not shares:  # again, if all who were asked have failed
            asked = members.muster()
            for worker in asked:
                members.tell(worker, "collect", 0)
            while not shares.keys() >= set(asked).intersection(members.there):
                heard = members.hear()
                if heard is not None and heard[0] in asked:  # else it is of an earlier batch, and its worker is gone
                    worker, index = heard
                    shares[worker] = worker.batches[index]
        return self._join([shares[worker] for worker in asked if worker in shares])


class FirstCome:
    """Workers go on while the trainer learns; a batch is the next one that any worker has finished."""

    buffers: ClassVar[int] = 2  # one is being filled while the other waits to be taken

    def __init__(self) -> None:
        self._busy: set[Worker] = set()

    def share(self, frames: int, workers: int) -> int:
        """All of them: a batch is one worker's."""
        return frames

    def require_joinable(self, workers: Collection[Worker]) -> None:
        """Each is a batch by itself."""

    def gather(self, members: Members[Any]) -> TensorDictBase:
        """See Gathering."""
        while True:
            there = members.muster()
            for worker in [worker for worker in there if worker not in self._busy]:
                for buffer in range(self.buffers):
                    members.tell(worker, "collect", buffer)
            self._busy = set(there)
            heard = members.hear()
            if heard is not None:
                worker, buffer = heard
                batch: Any = worker.batches[buffer]
                batch = batch.clone()
                members.tell(worker, "collect", buffer)
                return batch
