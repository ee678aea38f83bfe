"""The workers of a sender: which are present, which are absent, and which version each of them should have."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from wsync.errors import NotConnected, WorkerDied, join_indices
from wsync.weights.binding import dump_extra


class Membership:
    """All workers of one sender. Used by the thread that calls the scheme, under the sender's lock.

    Args:
        num_workers: the number of workers.

    Attributes:
        present: the workers that are sent updates.
        sent_to_all: the newest version that was published to all workers by the fast path; 0 if there is none.
        extra_states: each worker's extra state, as last sent.
        connected: whether all workers have connected once, and the sender was not closed since.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.present: Sequence[int] = range(num_workers)
        self.sent_to_all = 0
        self.extra_states: dict[int, bytes] = {}
        self.connected = False
        self._sent_to: dict[int, int] = {}  # by worker, the newest version that ``note_sent`` has recorded
        self._newest = 0  # of these
        self._causes: Mapping[int, str] = {}  # by absent worker: why it is absent

    @property
    def sent_version(self) -> int:
        """The newest version that was published; 0 before the first."""
        return max(self.sent_to_all, self._newest)

    @property
    def absent(self) -> Sequence[int]:
        """Workers that have died or left; updates to all workers are kept for their replacements."""
        return sorted(self._causes)

    def version_sent_to(self, worker: int) -> int:
        """Return the newest version that was sent to a worker's index; 0 if none was."""
        return max(self.sent_to_all, self._sent_to.get(worker, 0))

    def remove(self, causes: Mapping[int, str]) -> None:
        """Record that workers have died or left: ``{worker: cause}``. A worker that is absent keeps its first cause."""
        self._set({**causes, **self._causes})

    def add(self, workers: Collection[int]) -> None:
        """Record that workers are connected."""
        self._set({worker: cause for worker, cause in self._causes.items() if worker not in workers})

    def _set(self, causes: Mapping[int, str]) -> None:
        self._causes = causes
        self.present = [worker for worker in range(self.num_workers) if worker not in causes]

    def by_extra_state(
        self, workers: Sequence[int], extra: Mapping[str, Any] | None
    ) -> Sequence[tuple[Sequence[int], bytes]]:
        """Return the extra states to send to ``workers``, each with its workers: ``extra`` to all of them.

        If it is None (the weights are a plain TensorDict), every worker is sent the one that it has.
        """
        known = self.extra_states
        if extra is not None or not known:
            return [(workers, dump_extra(extra))]
        groups: dict[bytes, list[int]] = {}
        for worker in workers:
            groups.setdefault(known.get(worker, b""), []).append(worker)
        return [(workers, extra) for extra, workers in groups.items()]

    def recipients(self, worker_ids: int | Sequence[int] | None) -> tuple[Sequence[int], Sequence[int]]:
        """Return the workers that get an update, and the absent ones whose replacements will get it.

        Raises:
            NotConnected: not all workers have connected yet, or none is left.
            ValueError: there is no such worker, or none is named.
            WorkerDied: one that is named has died or left.
        """
        if not self.connected:
            raise NotConnected("not connected yet: call connect() on the sender (and on every worker) before send()")
        if worker_ids is None:
            if not self.present:
                hint = "start another process, then readmit(index, process)"
                raise NotConnected(f"every worker has died or left: {hint}{self._why(self.absent)}")
            return self.present, self.absent
        wanted = worker_list(worker_ids, self.num_workers)
        if gone := {worker: self._causes[worker] for worker in wanted if worker in self._causes}:
            left = join_indices(self.present) or "none"
            why = self._why(gone)
            raise WorkerDied(f"worker(s) {join_indices(gone)} died or left earlier; present: {left}{why}", gone)
        if not wanted:
            raise ValueError("worker_ids is empty: name at least one worker, or None for all")
        return wanted, ()

    def _why(self, workers: Collection[int]) -> str:
        """Return a line for each of these absent workers: why it is absent."""
        return "".join(f"\nworker {worker}: {self._causes[worker].strip()}" for worker in sorted(workers))

    def note_sent(self, version: int, extra: Sequence[tuple[Sequence[int], bytes]]) -> None:
        """Record a published version, with the extra state of each group of workers."""
        self._newest = version
        for workers, blob in extra:
            self._sent_to.update(dict.fromkeys(workers, version))
            if blob or self.extra_states:
                self.extra_states.update(dict.fromkeys(workers, blob))


def worker_list(worker_ids: object, num_workers: int | None = None) -> list[Any]:
    """Return the workers that ``worker_ids`` names, one or several, each once.

    Integers of any type are accepted (torch's, numpy's), and returned as plain ones.

    Raises:
        ValueError: one is not among ``num_workers`` workers; or is a bool, which may be part of a mask.
    """
    ids = worker_ids.tolist() if isinstance(worker_ids, np.ndarray | torch.Tensor) else worker_ids
    named = [as_plain_integer(one) for one in (ids if isinstance(ids, Iterable) else [ids])]
    if num_workers is not None:
        unknown = [one for one in named if type(one) is not int or one not in range(num_workers)]
        if unknown:
            raise ValueError(f"unknown worker_ids {unknown}: there are workers 0 to {num_workers - 1}")
    return list(dict.fromkeys(named))


def checked_worker_index(worker: object, num_workers: int) -> int:
    """Return the index of the one worker that ``worker`` names, as a plain integer.

    Raises:
        ValueError: it names none of ``num_workers`` workers, or several.
    """
    named = worker_list(worker, num_workers)
    if len(named) != 1:
        raise ValueError(f"worker is one worker's index, not {worker!r}")
    return named[0]


def as_plain_integer(value: Any) -> Any:
    """Return an integer of any type as a plain one (equal tensors are different keys), other values unchanged."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value
