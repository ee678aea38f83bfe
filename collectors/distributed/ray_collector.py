"""The collector that runs its workers as Ray actors."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import torch

import wsync
from wsync import SyncTimeout, missing_extra

try:
    import ray
    from ray.actor import ActorHandle
    from ray.exceptions import RayError
except ModuleNotFoundError as error:
    raise missing_extra(error, "ray") from error

from collectors.arguments import EnvMaker
from collectors.distributed.calls import CalledWorker, CallPool, Reply, execute
from collectors.distributed.ray_cluster import Cluster, describe_cluster, starts_one
from collectors.worker import CommandExecutor
from collectors.worker_collector import WorkerCollector
from collectors.workers.pool import Event
from collectors.workers.processes import SHUTDOWN_GRACE


class RayCollector(WorkerCollector):
    """Collects batches with Ray actors, one per worker; batches are in Ray's object store.

    The actors must be able to import the modules of the environments and policies (on other nodes: installed there, or
    by a ``runtime_env`` in ``resources``). They end with this collector, or with this process.

    Args:
        create_env_fn: one function per worker; each makes an environment (lambdas work).
        policy: see ``WorkerCollector``.
        sync: whether a batch has a share of every worker, and all wait for new weights; otherwise it is one worker's.
        address: the address of a Ray cluster, as ``ray.init`` takes it. None: the connected cluster, or that of
            ``RAY_ADDRESS``; without both, a cluster is started on this machine, and stopped by ``shutdown``.
        resources: the resources of each actor, as options of ``ray.remote``: ``num_cpus`` (0 by default), ``num_gpus``,
            ``memory``, ``resources``, ``runtime_env`` …
        scheduling_strategy: where actors are placed: ``"DEFAULT"``, ``"SPREAD"``, or an object of Ray's.
        timeout: seconds in which the cluster has to place all actors, and later each one that replaces another.
        options: see ``WorkerCollector``.

    Raises:
        ConnectionError: there is no cluster at ``address``, or this process is connected to another one.
        wsync.SyncTimeout: the cluster had no place for an actor; names the required and the available resources.
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
    """The actor. It executes commands in order; the concurrency group ``weights`` receives updates meanwhile."""

    def __init__(self, path: Sequence[str]) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C may reach the whole process group
        sys.path.extend(entry for entry in path if entry not in sys.path)
        # Ray configures logging.
        self._executor = CommandExecutor(lambda options: torch.set_num_threads(options.threads))

    def lifetime(self) -> None:
        """Never return. The trainer's call fails when the process ends."""
        threading.Event().wait()

    def ready(self) -> None:
        """Return once the actor exists."""

    def execute(self, command: str, argument: Any) -> Reply:
        """Execute a command; ``end`` is the last one."""
        reply = execute(self._executor, command, argument)
        return reply if reply.payload is None else reply._replace(payload=np.asarray(reply.payload))


class RayWorker(CalledWorker):
    """An actor.

    Attributes:
        place_until: when the cluster has to have started it (``time.monotonic``); infinity: at any time, or it has.
    """

    def __init__(self, worker_idx: int, actor: ActorHandle, cluster: Cluster) -> None:
        super().__init__(worker_idx)
        self.actor, self.place_until = actor, math.inf
        self._cluster = cluster
        lifetime: Any = actor.lifetime
        self._on_reply(lifetime.options(concurrency_group="lifetime").remote(), lambda _: self._ended.set())

    def call(self, command: str, argument: Any, on_reply: Callable[[Reply], None]) -> None:
        """Call the actor."""
        try:
            self._cluster.require()
            self._on_reply(self.actor.execute.remote(command, argument), on_reply)
        except (RayError, ConnectionError) as error:
            on_reply(self._died(error))

    def _on_reply(self, reference: Any, on_reply: Callable[[Reply], None]) -> None:
        def on_done(future: Any) -> None:
            error = future.exception()
            on_reply(future.result() if error is None else self._died(error))

        reference.future().add_done_callback(on_done)

    def _died(self, error: BaseException) -> Reply:
        return Reply("died", f"(a Ray actor) died: {str(error).strip()}")

    def place_within(self, seconds: float) -> None:
        """Set the deadline for the cluster to start it."""
        self.place_until = time.monotonic() + seconds
        self.actor.ready.remote().future().add_done_callback(self._placed)

    def _placed(self, _: Any) -> None:
        self.place_until = math.inf  # or it is dead, which `sentinel` and the answer to the first command tell

    def kill(self) -> None:
        """Kill the actor's process; without a connection to its cluster, it has ended already."""
        if self._cluster.connected:
            ray.kill(self.actor, no_restart=True)


class RayPool(CallPool[RayWorker]):
    """Actors of a Ray cluster."""

    def __init__(
        self, count: int, *, address: str | None, resources: Mapping[str, Any], scheduling_strategy: Any, timeout: float
    ) -> None:
        self._cluster = Cluster(address)  # first: it may raise, and nothing has to be closed then
        super().__init__()
        self._all_placed_once = False
        self._resources, self._timeout = dict(resources), timeout
        remote: Any = ray.remote
        try:
            kind = remote(concurrency_groups={"weights": 1, "lifetime": 1})(RayWorkerActor)
            self._kind = kind.options(**{"num_cpus": 0, **resources, "scheduling_strategy": scheduling_strategy})
            for i in range(count):
                self.start_worker(i)
            self._wait_for_actors()
        except BaseException:  # also Ctrl-C: the cluster and the actors that have been started are ended
            self.close()
            raise

    def _wait_for_actors(self) -> None:
        references = {worker.actor.ready.remote(): worker.worker_idx for worker in self.workers}
        ready, missing = ray.wait(list(references), num_returns=len(references), timeout=self._timeout)
        if missing:
            names = {references[one]: "never started" for one in missing}
            raise SyncTimeout(f"worker(s) {', '.join(map(str, sorted(names)))} {self._no_place()}", names)
        self._all_placed_once = True
        ray.get(ready)  # raises the error of an actor's constructor

    def _no_place(self) -> str:
        return (
            f"had no place in the Ray cluster, or did not start, within {self._timeout:g} s: needed for each is "
            f"{self._resources or 'nothing special'}, and {describe_cluster()}"
        )

    def start_worker(self, worker_idx: int) -> RayWorker:
        """Start an actor; one in place of another that is not placed within the timeout is ``unplaced``."""
        self._cluster.require()
        self.workers.append(worker := RayWorker(worker_idx, self._kind.remote(sys.path), self._cluster))
        if self._all_placed_once:
            worker.place_within(self._timeout)
        return worker

    def poll(self, workers: Collection[RayWorker], wakeup_fd: int, timeout: float | None) -> list[Event]:
        """Return the replies of ``workers`` as events, and report those that have found no place."""
        until = min((worker.place_until for worker in workers), default=math.inf)
        if until < math.inf:
            left = max(0.0, until - time.monotonic())
            timeout = left if timeout is None else min(left, timeout)
        events = super().poll(workers, wakeup_fd, timeout)
        late = [worker for worker in workers if worker.place_until <= time.monotonic()]
        return [*events, *(Event(worker, "unplaced", f"(a Ray actor) {self._no_place()}") for worker in late)]

    def discard(self, worker: RayWorker) -> None:
        """Kill the actor."""
        self.workers.remove(worker)
        worker.kill()
        worker.close()

    def close(self) -> None:
        """End the actors, and a cluster that was started for them."""
        if self._cluster.connected:
            if self._all_placed_once:
                self._end_workers()
            for worker in self.workers:
                worker.kill()
            deadline = time.monotonic() + SHUTDOWN_GRACE
            for worker in self.workers:
                wait([worker.sentinel], max(0.0, deadline - time.monotonic()))
        for worker in self.workers:
            worker.close()
        self.workers = []
        self._replied.close()
        self._cluster.close()
