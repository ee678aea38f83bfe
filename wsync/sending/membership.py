"""The workers of a sender: who is there, who has gone, and what each is to have."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from wsync.errors import NotConnected, WorkerDied


class Membership:
    """All workers of one sender.

    Args:
        num_workers: how many there are to be.

    Attributes:
        present: those who are sent updates.
        absent: those who have died or left; what is for all is kept for who comes in their place.
        due: the version that each worker, or who comes in its place, is to have.
        extra: each worker's extra state, as last sent.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.present: Sequence[int] = range(num_workers)
        self.absent: Sequence[int] = ()
        self.due: dict[int, int] = {}
        self.extra: dict[int, bytes] = {}

    def strike(self, workers: Collection[int]) -> None:
        """They have died or left."""
        self._set({*self.absent, *workers})

    def restore(self, workers: Collection[int]) -> None:
        """They are there, or somebody has come in their place."""
        self._set({*self.absent}.difference(workers))

    def _set(self, absent: Collection[int]) -> None:
        self.absent = sorted(absent)
        self.present = [worker for worker in range(self.num_workers) if worker not in absent]

    def addressees(self, worker_ids: int | Sequence[int] | None) -> tuple[Sequence[int], Sequence[int]]:
        """Who is to have an update and answer to it, and for whose successors it is to be kept.

        Raises:
            NotConnected: nobody is left.
            ValueError: there is no such worker; or none is named.
            WorkerDied: one that is named has gone.
        """
        if worker_ids is None:
            if not self.present:
                raise NotConnected("every worker has died or left: there is nobody to send to")
            return self.present, self.absent
        wanted = worker_list(worker_ids, self.num_workers)
        gone = {worker: "has died or left before" for worker in wanted if worker in self.absent}
        if gone:
            raise WorkerDied(f"worker(s) {sorted(gone)} have died or left; the others are {list(self.present)}", gone)
        if not wanted:
            raise ValueError("worker_ids is empty: name at least one worker, or None for all")
        return wanted, ()

    def note(self, version: int, blobs: Sequence[tuple[Sequence[int], bytes]]) -> None:
        """A version was handed over, with the extra state of each part: ``(workers, extra)``."""
        for workers, blob in blobs:
            self.due.update(dict.fromkeys(workers, version))
            if blob or self.extra:
                self.extra.update(dict.fromkeys(workers, blob))


def worker_list(worker_ids: object, num_workers: int | None = None) -> list[Any]:
    """The workers that ``worker_ids`` names, one or several, each once; integers of any type (torch's) as plain ones.

    Raises:
        ValueError: one is not of so many workers. A truth value is none: it may be of a mask.
    """
    ids = worker_ids.tolist() if isinstance(worker_ids, np.ndarray | torch.Tensor) else worker_ids
    named = [plain(one) for one in (ids if isinstance(ids, Iterable) else [ids])]
    if num_workers is not None:
        unknown = [one for one in named if type(one) is not int or one not in range(num_workers)]
        if unknown:
            raise ValueError(f"unknown worker_ids {unknown}: there are workers 0 to {num_workers - 1}")
    return list(dict.fromkeys(named))


def plain(one: Any) -> Any:
    """An integer of any type as a plain one: equal tensors are different keys of a dictionary; all else as it is."""
    try:
        return one if isinstance(one, bool) else operator.index(one)
    except TypeError:
        return one
