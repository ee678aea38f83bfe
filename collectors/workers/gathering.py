"""How a batch is made of the workers' batches: synchronously from all, or asynchronously from the first."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal

from tensordict import TensorDictBase

from collectors.batch_layout import warn_if_rounded
from collectors.staleness import check_count
from collectors.workers.group import WorkerGroup
from collectors.workers.joining import JoinedBatch, Joiner, join
from collectors.workers.pool import WorkerHandle

Admits = Callable[[TensorDictBase, int], bool]
"""``admits(batch, worker_idx)``: whether a worker's batch is new enough to be delivered; counts those that are not."""


class SyncGathering:
    """Every worker collects its share of a batch, then waits for the next one.

    The share of a worker that fails before it is complete is left out.

    Attributes:
        buffers: batches of one worker that are in flight.

    Args:
        cat_results: how the shares are joined: along a dimension, or ``"stack"`` with a new leading one.

    Raises:
        ValueError: ``cat_results`` is neither.
    """

    buffers = 1

    def __init__(self, cat_results: int | Literal["stack"]) -> None:
        if cat_results != "stack" and (isinstance(cat_results, bool) or not isinstance(cat_results, int)):
            raise ValueError(f"cat_results is a dimension or 'stack', not {cat_results!r}")
        self._cat_results: int | Literal["stack"] = cat_results
        self._joiner: Joiner | None = None

    def share(self, frames: int, workers: int) -> int:
        """Return the frames of each worker's batch, rounded up."""
        return -(-frames // workers)

    def check_shapes(self, workers: Collection[WorkerHandle], frames: int) -> None:
        """Check that the batches of ``workers`` can be joined; warn if they have more than ``frames`` rows in all.

        Called once, when all workers are ready.

        Raises:
            ValueError: they cannot.
        """
        batches = [worker.batches[0] for worker in workers]
        columns = {frozenset(batch.keys(include_nested=True, leaves_only=True)) for batch in batches}
        if odd := sorted(map(str, frozenset.union(*columns) - frozenset.intersection(*columns))):
            raise ValueError(f"workers' batches cannot be joined: not all have {', '.join(odd)}")
        try:
            self._joiner = Joiner(list(workers), self._cat_results)
        except (IndexError, RuntimeError) as error:
            listed = ", ".join(str(list(shape)) for shape in dict.fromkeys(batch.batch_size for batch in batches))
            raise ValueError(
                f"cat_results={self._cat_results!r} cannot join workers' batches of shape {listed}: {error}"
            ) from error
        warn_if_rounded(frames, *(batch.numel() for batch in batches))

    def gather(self, group: WorkerGroup, admits: Admits) -> TensorDictBase:
        """Return one batch, in memory that no worker writes to; what ``admits`` rejects is collected anew.

        Raises:
            WorkerDied, WorkerFailed, SyncTimeout: a failure that the group's policy raises.
            RuntimeError: see ``admits``.
        """
        while True:  # again, if all participants have failed
            participants = to_collect = group.wait_for_workers()
            arrived: set[WorkerHandle] = set()
            joined: JoinedBatch | None = None
            while to_collect:
                for worker in to_collect:
                    group.collect(worker, 0)
                joined = joined or self._begin(participants)  # while the workers collect
                while True:
                    missing = set(participants).intersection(group.active_workers) - arrived
                    received = group.next_batch(missing)  # also of a participant that has failed since
                    if received is None and not missing:
                        break
                    # Other batches are those of workers that failed within an earlier batch.
                    if received is not None and received[0] in participants:
                        arrived.add(received[0])
                        joined.add(received[0])
                present = [worker for worker in participants if worker in arrived]
                to_collect = [worker for worker in present if not admits(worker.batches[0], worker.worker_idx)]
                arrived.difference_update(to_collect)
            if joined is not None and len(arrived) == len(participants):
                return joined.batch
            if arrived:
                return join([worker.batches[0] for worker in participants if worker in arrived], self._cat_results)

    def _begin(self, workers: list[WorkerHandle]) -> JoinedBatch:
        if self._joiner is None or self._joiner.workers != workers:
            self._joiner = Joiner(workers, self._cat_results)
        return self._joiner.begin()


class AsyncGathering:
    """Workers collect without a pause; a batch is the next one that any worker has completed.

    Args:
        run_ahead: how many further batches a worker may begin while a finished one waits for the trainer.

    Raises:
        TypeError: it is not a whole number.
        ValueError: it is negative.
    """

    def __init__(self, run_ahead: int) -> None:
        check_count("run_ahead", run_ahead)
        self.buffers = int(run_ahead) + 1
        self._collecting: set[WorkerHandle] = set()

    def share(self, frames: int, workers: int) -> int:
        """Return ``frames``: a batch comes from one worker."""
        return frames

    def check_shapes(self, workers: Collection[WorkerHandle], frames: int) -> None:
        """Warn if the largest batch has more than ``frames`` rows. Any shapes are accepted: they are not joined."""
        warn_if_rounded(frames, max(worker.batches[0].numel() for worker in workers))

    def gather(self, group: WorkerGroup, admits: Admits) -> TensorDictBase:
        """See SyncGathering."""
        while True:
            active = group.wait_for_workers()
            for worker in [worker for worker in active if worker not in self._collecting]:
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


def gathering(sync: bool, cat_results: int | Literal["stack"], run_ahead: int | None) -> Gathering:
    """Return the way of gathering for a collector's arguments.

    Raises:
        TypeError, ValueError: an argument is out of range; or ``run_ahead`` of synchronous collection, where no worker
            begins a batch before the trainer requests it; or ``cat_results`` of asynchronous collection, where batches
            are not joined.
    """
    synchronous = SyncGathering(cat_results)
    if not sync:
        if cat_results != "stack":
            raise ValueError(
                f"cat_results={cat_results} is for synchronous collection: an asynchronous batch is one worker's; "
                "leave cat_results out, or collect synchronously"
            )
        return AsyncGathering(1 if run_ahead is None else run_ahead)
    if run_ahead is not None:
        raise ValueError(f"run_ahead={run_ahead} is for asynchronous collection: a synchronous one never runs ahead")
    return synchronous
