"""The older API's updaters for workers that are reached over a network; each is a way to call their scheme."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from collectors.ready_updaters import ReadyMade, given


class RPCWeightUpdater(ReadyMade):
    """Deprecated. Updates the workers of an ``RPCCollector``.

    Args:
        collector_infos: one for each worker; only their number is looked at.
        collector_class: of the remote collectors; taken, and not needed.
        collector_rrefs: as ``collector_infos``.
        policy_weights: pushed when none are given, as they are then; None: the collector's policy's.
        num_workers: how many there have to be; None: as many as there are.

    Raises:
        ValueError: the numbers contradict one another.
    """

    carriers = frozenset({"rpc", "distributed"})

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
        said = {name: count for name, count in counts.items() if count is not None}
        if len(set(said.values())) > 1:
            raise ValueError("how many workers? " + ", ".join(f"{name}: {count}" for name, count in said.items()))
        super().__init__(given(policy_weights), next(iter(said.values()), None))


class DistributedWeightUpdater(ReadyMade):
    """Deprecated. Updates the workers of a ``DistributedCollector``.

    Args:
        store: taken, and not needed: the scheme has its own rendezvous.
        policy_weights: pushed when none are given, as they are then; None: the collector's policy's.
        num_workers: how many there have to be; None: as many as there are.
        sync: whether a push waits until the workers have the weights.
    """

    carriers = frozenset({"distributed"})

    def __init__(
        self, store: Any = None, policy_weights: Any = None, num_workers: int | None = None, sync: bool = True
    ) -> None:
        super().__init__(given(policy_weights), num_workers)
        self.sync = sync

    def _deliver(self, outbox: Mapping[int, Any], *, wait: bool = True) -> None:
        super()._deliver(outbox, wait=wait and self.sync)
