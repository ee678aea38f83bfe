"""How a batch is made of the workers' batches: synchronously from all, or asynchronously from the first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDictBase

from collectors.batches import check_count, warn_if_rounded
from collectors.workers.group import WorkerGroup
from collectors.workers.pool import WorkerHandle

Admits = Callable[[TensorDictBase, int], bool]
"""``admits(batch, worker_idx)``: whether a worker's batch is new enough to be delivered; counts those that are not."""

How = int | Literal["stack"]
"""How batches are joined: along a dimension (negative: counted from their last one), or with a new leading one."""


def join(batches: Sequence[Any], how: How) -> Any:
    """Return tensors or TensorDicts joined in new memory."""
    return torch.stack(list(batches)) if how == "stack" else torch.cat(list(batches), how)


class SyncGathering:
    """Every worker collects its share of a batch, then waits for the next one; that of one that fails is left out."""

    buffers = 1  # batches of one worker that are in flight

    def __init__(self, cat_results: How) -> None:
        if cat_results != "stack" and (isinstance(cat_results, bool) or not isinstance(cat_results, int)):
            raise ValueError(f"cat_results is a dimension or 'stack', not {cat_results!r}")
        self._how: How = cat_results

    def check_shapes(self, workers: Collection[WorkerHandle], frames: int) -> None:
        """Check that the batches of ``workers`` can be joined; warn if they have more than ``frames`` rows in all.

        Called once, when all workers are ready.
        """
        batches = [worker.batches[0] for worker in workers]
        columns = {frozenset(batch.keys(include_nested=True, leaves_only=True)) for batch in batches}
        if odd := sorted(map(str, frozenset.union(*columns) - frozenset.intersection(*columns))):
            raise ValueError(f"workers' batches cannot be joined: not all have {', '.join(odd)}")
        try:
            join([batch.to("meta") for batch in batches], self._how)
        except (IndexError, RuntimeError) as error:
            listed = ", ".join(str(list(shape)) for shape in dict.fromkeys(batch.batch_size for batch in batches))
            raise ValueError(
                f"cat_results={self._how!r} cannot join workers' batches of shape {listed}: {error}"
            ) from error
        warn_if_rounded(frames, *(batch.numel() for batch in batches))

    def gather(self, group: WorkerGroup, admits: Admits) -> TensorDictBase:
        """Return one batch, in memory that no worker writes to; what ``admits`` rejects is collected anew."""
        while True:  # again, if all participants have failed
            participants = to_collect = group.wait_for_workers()
            arrived: set[WorkerHandle] = set()
            while to_collect:
                for worker in to_collect:
                    group.collect(worker, 0)
                while True:
                    missing = set(participants).intersection(group.active_workers) - arrived
                    received = group.next_batch(missing)  # also of a participant that has failed since
                    if received is None and not missing:
                        break
                    # Other batches are those of workers that failed within an earlier batch.
                    if received is not None and received[0] in participants:
                        arrived.add(received[0])
                present = [worker for worker in participants if worker in arrived]
                to_collect = [worker for worker in present if not admits(worker.batches[0], worker.worker_idx)]
                arrived.difference_update(to_collect)
            if arrived:
                return join([worker.batches[0] for worker in participants if worker in arrived], self._how)


class AsyncGathering:
    """Workers collect without a pause; a batch is the next one that any worker has completed."""

    def __init__(self, run_ahead: int) -> None:
        check_count("run_ahead", run_ahead)
        self.buffers = int(run_ahead) + 1
        self._collecting: set[WorkerHandle] = set()

    def check_shapes(self, workers: Collection[WorkerHandle], frames: int) -> None:
        """Warn if the largest batch has more than ``frames`` rows. Any shapes are accepted: they are not joined."""
        warn_if_rounded(frames, max(worker.batches[0].numel() for worker in workers))

    def gather(self, group: WorkerGroup, admits: Admits) -> TensorDictBase:
        """Return one batch, as ``SyncGathering.gather``."""
        while True:
            active = group.wait_for_workers()
            for worker in active:
                if worker not in self._collecting:
                    for buffer in range(self.buffers):
                        group.collect(worker, buffer)
            self._collecting = set(active)
            received = group.next_batch(active)
            if received is not None:
                worker, buffer = received
                batch: Any = worker.batches[buffer]
                batch = batch.clone() if admits(batch, worker.worker_idx) else None
                group.collect(worker, buffer)
                if batch is not None:
                    return batch


Gathering = SyncGathering | AsyncGathering


def gathering(sync: bool, cat_results: How, run_ahead: int | None) -> Gathering:
    """Return the way of gathering for a collector's arguments."""
    if sync:
        if run_ahead is not None:
            raise ValueError(f"run_ahead={run_ahead} is for asynchronous collection: a synchronous one waits")
        return SyncGathering(cat_results)
    if cat_results != "stack":
        raise ValueError(
            f"cat_results={cat_results} is for synchronous collection: an asynchronous batch is one worker's"
        )
    return AsyncGathering(1 if run_ahead is None else run_ahead)
