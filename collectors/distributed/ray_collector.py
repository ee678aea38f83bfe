"""The collector whose workers are Ray actors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import wsync
from collectors.crew import CrewCollector, CrewOptions
from collectors.distributed.ray_cluster import starts_one
from collectors.distributed.ray_pool import RayPool
from collectors.making import EnvMaker


class RayCollector(CrewCollector):
    """Gathers batches with Ray actors, one per worker; batches come through Ray's object store.

    The actors must be able to import what the environments and policies come from (on other nodes: installed there,
    or by a ``runtime_env`` in ``resources``). They end with this collector, or with this process.

    Args:
        create_env_fn: one function per worker; each makes an environment (lambdas are fine).
        policy: as ``CrewCollector``.
        sync: whether all workers wait for each other, and for new weights; otherwise a batch is one worker's.
        address: of a Ray cluster, as ``ray.init`` takes it. None: the one that this process is connected to, or that
            ``RAY_ADDRESS`` says; without them, one is started on this machine, and stopped at ``shutdown``.
        resources: of each actor, as options of ``ray.remote``: ``num_cpus`` (0 unless said), ``num_gpus``, ``memory``,
            ``resources``, ``runtime_env`` …
        scheduling_strategy: where actors are placed: ``"DEFAULT"``, ``"SPREAD"``, or an object of Ray's.
        timeout: seconds in which the cluster has to find a place for all of them.
        options: as ``CrewCollector``.

    Raises:
        ConnectionError: no cluster at ``address``, or this process is connected to another.
        wsync.SyncTimeout: the cluster had no place for an actor; says what it needs and what there is.
        Exception: else as ``CrewCollector``.
    """

    def __init__(
        self,
        create_env_fn: EnvMaker | Sequence[EnvMaker],
        policy: Any = None,
        *,
        sync: bool = True,
        address: str | None = None,
        resources: Mapping[str, Any] | None = None,
        scheduling_strategy: Any = "DEFAULT",
        timeout: float = 60.0,
        **options: Unpack[CrewOptions],
    ) -> None:
        self._own_cluster = starts_one(address)
        start = partial(
            RayPool,
            address=address,
            resources=dict(resources or {}),
            scheduling_strategy=scheduling_strategy,
            timeout=timeout,
        )
        super().__init__(create_env_fn, policy, sync=sync, start=start, **options)

    def _default_scheme(self) -> wsync.WeightSyncScheme:
        return wsync.WeightSyncScheme.from_backend("ray", host="127.0.0.1" if self._own_cluster else "node")
