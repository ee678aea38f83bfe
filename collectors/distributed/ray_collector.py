"""The collector that runs its workers as Ray actors."""

from __future__ import annotations

import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import wsync
from wsync import missing_extra
from wsync.control import Address

try:
    import ray
    from ray.actor import ActorHandle
except ModuleNotFoundError as error:
    raise missing_extra(error, "ray") from error

from collectors.arguments import EnvMaker
from collectors.distributed.ray_cluster import Cluster, starts_one
from collectors.worker_collector import WorkerCollector
from collectors.workers import processes
from collectors.workers.connections import Listener
from collectors.workers.pool import WorkerHandle, WorkerPool, work


class RayCollector(WorkerCollector):
    """Collects batches with Ray actors, one per worker, which connect to this process over TCP.

    The actors must be able to import the modules of the environments and policies (on other nodes: installed there, or
    by a ``runtime_env`` in ``resources``). They end with this collector, or with this process.

    Args:
        create_env_fn: one function per worker; this, ``policy``, ``sync`` and ``options``: see ``WorkerCollector``.
        address: the address of a Ray cluster, as ``ray.init`` takes it. None: the connected cluster, or that of
            ``RAY_ADDRESS``; without both, a cluster is started on this machine, and stopped by ``shutdown``.
        resources: the resources of each actor, as options of ``ray.remote``: ``num_cpus`` (0 by default), ``num_gpus``,
            ``memory``, ``resources``, ``runtime_env`` …
        scheduling_strategy: where actors are placed: ``"DEFAULT"``, ``"SPREAD"``, or an object of Ray's.
        timeout: seconds in which the cluster has to place all actors; one that replaces another has ``worker_timeout``.

    Raises:
        ConnectionError: there is no cluster at ``address``, or this process is connected to another one.
        wsync.SyncTimeout: the cluster had no place for an actor; names the required resources.
        Exception: else as ``WorkerCollector``.
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
        **options: Any,
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


class RayWorkerActor:
    """The actor, with the trainer's ``sys.path``: its one call is the worker."""

    def __init__(self, path: Sequence[str]) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C may reach the whole process group
        sys.path.extend(entry for entry in path if entry not in sys.path)

    def work(self, address: Address, worker_idx: int, key: bytes) -> None:
        """Connect to the trainer, and execute its commands until it ends the worker."""
        work(address, worker_idx, key)


class RayWorker(WorkerHandle):
    """An actor, owned by this handle."""

    def __init__(self, worker_idx: int, actor: ActorHandle, cluster: Cluster, address: Address) -> None:
        super().__init__(worker_idx, secrets.token_hex(16).encode(), name="(a Ray actor)")
        self.actor = actor
        self._cluster, self._reason = cluster, ""
        self._done = actor.work.remote(address, worker_idx, self.key)
        self._done.future().add_done_callback(self._on_done)

    def _on_done(self, future: Any) -> None:
        error = future.exception()
        self._reason = "has ended" if error is None else f"died: {str(error).strip()}"
        self.gave_up.set()

    def exit_reason(self) -> str:
        """Return how the actor has ended, as text to follow "worker 3 "."""
        try:
            self._cluster.require()
        except ConnectionError as error:
            return f"{self.name} died: {error}"
        wait([self.gave_up.fileno()], processes.SHUTDOWN_GRACE)
        return f"{self.name} {self._reason or 'has lost its connection, and has not ended'}"

    def close(self) -> None:
        """Close the connection, and kill the actor; without a connection to its cluster, it has ended already."""
        if self._cluster.connected:
            ray.kill(self.actor, no_restart=True)
        super().close()


class RayPool(WorkerPool):
    """Actors of a Ray cluster; ``RayCollector`` documents the arguments."""

    def __init__(
        self, count: int, *, address: str | None, resources: Mapping[str, Any], scheduling_strategy: Any, timeout: float
    ) -> None:
        is_own = starts_one(address)
        self._cluster = Cluster(address)  # first: it may raise, and nothing has to be closed then
        self._resources = dict(resources)
        remote: Any = ray.remote
        options = {"num_cpus": 0, **resources, "scheduling_strategy": scheduling_strategy}
        try:
            self._kind = remote(RayWorkerActor).options(**options)
            super().__init__(count, Listener("127.0.0.1" if is_own else ray.util.get_node_ip_address()))
            self.wait_for_workers(timeout)
        except BaseException:  # also Ctrl-C: the cluster and the actors that have been started are ended
            if "workers" in vars(self):
                self.close()
            self._cluster.close()
            raise

    def start_worker(self, worker_idx: int) -> RayWorker:
        """Start an actor."""
        self._cluster.require()
        actor = self._kind.remote(sys.path)
        self.workers.append(worker := RayWorker(worker_idx, actor, self._cluster, self.listener.address))
        return worker

    def _why_late(self, timeout: float) -> str:
        return (
            f"had no place in the Ray cluster, or did not start, within {timeout:g} s: needed for each is "
            f"{self._resources or 'nothing special'} (`ray status` says what is free)"
        )

    def close(self) -> None:
        """End the actors, and a cluster that was started for them."""
        super().close()
        self._cluster.close()
