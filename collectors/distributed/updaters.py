"""The older API's weight updaters for workers that are reached over a network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sized
from typing import Any

from collectors.updaters import SchemeUpdater, source_of


class RPCWeightUpdater(SchemeUpdater):
    """Deprecated. Updates the workers of an ``RPCCollector``.

    Args:
        collector_infos: one per worker; only their number is used.
        collector_class: not used.
        collector_rrefs: see ``collector_infos``.
        policy_weights: weights of a push without any, as they are then; None: those of the collector's policy.
        num_workers: number of workers that the collector must have; None: any.

    Raises:
        ValueError: the numbers contradict each other.
    """

    backends = frozenset({"rpc", "distributed"})

    def __init__(
        self,
        collector_infos: Sized | None = None,
        collector_class: Any = None,
        collector_rrefs: Sized | None = None,
        policy_weights: Any = None,
        num_workers: int | None = None,
    ) -> None:
        counts = {
            "collector_infos": None if collector_infos is None else len(collector_infos),
            "collector_rrefs": None if collector_rrefs is None else len(collector_rrefs),
            "num_workers": num_workers,
        }
        given = {name: count for name, count in counts.items() if count is not None}
        if len(set(given.values())) > 1:
            raise ValueError("how many workers? " + ", ".join(f"{name}: {count}" for name, count in given.items()))
        super().__init__(source_of(policy_weights), next(iter(given.values()), None))


class DistributedWeightUpdater(SchemeUpdater):
    """Deprecated. Updates the workers of a ``DistributedCollector``.

    Args:
        store: not used: the scheme has its own rendezvous.
        policy_weights: weights of a push without any, as they are then; None: those of the collector's policy.
        num_workers: number of workers that the collector must have; None: any.
        sync: whether a push waits for the workers' acknowledgements.
    """

    backends = frozenset({"distributed"})

    def __init__(
        self, store: Any = None, policy_weights: Any = None, num_workers: int | None = None, sync: bool = True
    ) -> None:
        super().__init__(source_of(policy_weights), num_workers)
        self.sync = sync

    def _deliver(self, outbox: Mapping[int, Any], *, wait: bool = True) -> None:
        super()._deliver(outbox, wait=wait and self.sync)


class RayWeightUpdater(SchemeUpdater):
    """Deprecated. Updates the workers of a ``RayCollector``, each time or only after some pushes.

    Args:
        policy_weights: weights of a push without any, as they are then; None: those of the collector's policy.
        remote_collectors: one per worker; only their number is used.
        max_interval: pushes that leave a worker out between two that update it.
    """

    backends = frozenset({"ray", "distributed"})

    def __init__(
        self, policy_weights: Any = None, remote_collectors: Sized | None = None, max_interval: int = 0
    ) -> None:
        if max_interval < 0:
            raise ValueError(f"max_interval is at least 0, not {max_interval}")
        super().__init__(source_of(policy_weights), None if remote_collectors is None else len(remote_collectors))
        self.max_interval = max_interval
        self._skipped: Counter[int | None] = Counter()

    def _skip_update(self, worker_id: int | None) -> bool:
        skip = self._skipped[worker_id] < self.max_interval
        self._skipped[worker_id] = self._skipped[worker_id] + 1 if skip else 0
        return skip
