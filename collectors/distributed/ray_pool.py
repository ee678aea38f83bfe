"""Workers that are Ray actors: the actor, and the trainer's side of it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import RayError

from collectors.distributed.called import CalledCore
from collectors.distributed.calls import Answer, CalledWorker, CallPool, WakeEvent
from collectors.distributed.ray_cluster import Cluster
from collectors.workers.pool import GRACE
from wsync import SyncTimeout


class Acting:
    """The actor. Its commands come in order; beside them the group ``weights`` is for whoever brings weights.

    Args:
        path: where the trainer finds its modules.
    """

    def __init__(self, path: Sequence[str]) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C may reach the whole process group
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self._core = CalledCore(lambda options: torch.set_num_threads(options.threads))  # logging is Ray's

    def life(self) -> None:
        """Never return: the trainer's call breaks when the process ends."""
        threading.Event().wait()

    def hello(self) -> None:
        """Return at once: the actor is there."""

    def obey(self, command: str, argument: Any) -> Answer:
        """Do a command; ``end`` is the last."""
        if command == "end":
            self._core.close()
            return Answer("ended")
        answer = self._core.obey(command, argument)
        return answer if answer.payload is None else replace(answer, payload=np.asarray(answer.payload))


class RayWorker(CalledWorker):
    """An actor.

    Args:
        worker_idx: its index.
        actor: owned by this end.
        cluster: where it lives.
    """

    def __init__(self, worker_idx: int, actor: ActorHandle, cluster: Cluster) -> None:
        super().__init__(worker_idx)
        self.actor = actor
        self._cluster = cluster
        self._end = WakeEvent()
        life: Any = actor.life
        self._watch(life.options(concurrency_group="life").remote(), lambda _: self._end.set())

    @property
    def sentinel(self) -> int:
        """Readable when the worker or its process has ended."""
        return self._end.fileno()

    def call(self, command: str, argument: Any, answered: Callable[[Answer], None]) -> None:
        """See CalledWorker."""
        try:
            self._cluster.require()
            self._watch(self.actor.obey.remote(command, argument), answered)
        except (RayError, ConnectionError) as error:
            answered(self._died(error))

    def _watch(self, reference: Any, answered: Callable[[Answer], None]) -> None:
        def on_done(future: Any) -> None:
            error = future.exception()
            answered(future.result() if error is None else self._died(error))

        reference.future().add_done_callback(on_done)

    def _died(self, error: BaseException) -> Answer:
        return Answer("died", f"(a Ray actor) died: {str(error).strip()}")

    def hello(self) -> Any:
        """A reference that is there when the actor is."""
        return self.actor.hello.remote()

    def kill(self) -> None:
        """End the process; it has ended with this process's connection to its cluster."""
        if self._cluster.connected:
            ray.kill(self.actor, no_restart=True)

    def close(self) -> None:
        """Let go of what this end has of it."""
        self._end.close()


class RayPool(CallPool[RayWorker]):
    """Actors of a Ray cluster.

    Args:
        count: how many.
        address: see ``Cluster``.
        resources: options of each actor, as ``ray.remote`` takes them.
        scheduling_strategy: where they are placed, as Ray takes it.
        timeout: seconds in which they have to be there.

    Raises:
        ConnectionError: see ``Cluster``.
        SyncTimeout: the cluster had no place for an actor in time.
    """

    def __init__(
        self,
        count: int,
        *,
        address: str | None,
        resources: Mapping[str, Any],
        scheduling_strategy: Any,
        timeout: float,
    ) -> None:
        super().__init__()
        self._cluster = Cluster(address)
        self._here = False
        remote: Any = ray.remote
        kind = remote(concurrency_groups={"weights": 1, "life": 1})(Acting)
        self._kind = kind.options(**{"num_cpus": 0, **resources, "scheduling_strategy": scheduling_strategy})
        try:
            for i in range(count):
                self.begin(i)
            self._await_all(resources, timeout)
        except BaseException:
            self.close()
            raise

    def _await_all(self, resources: Mapping[str, Any], timeout: float) -> None:
        hellos = {worker.hello(): worker.worker_idx for worker in self.workers}
        here, missing = ray.wait(list(hellos), num_returns=len(hellos), timeout=timeout)
        if missing:
            names = {hellos[one]: "never started" for one in missing}
            raise SyncTimeout(
                f"worker(s) {', '.join(map(str, sorted(names)))} had no place in the Ray cluster within {timeout:g} s: "
                f"each needs {dict(resources) or 'nothing special'}, and there is {ray.available_resources()}",
                names,
            )
        self._here = True
        ray.get(here)  # raises what kept an actor from being made

    def begin(self, worker_idx: int) -> RayWorker:
        """See Pool. It has no deadline for its place in the cluster but that for its first answer."""
        self._cluster.require()
        worker = RayWorker(worker_idx, self._kind.remote(sys.path), self._cluster)
        self.workers.append(worker)
        return worker

    def let_go(self, worker: RayWorker) -> None:
        """See Pool."""
        self.workers.remove(worker)
        worker.kill()
        worker.close()

    def close(self) -> None:
        """See Pool."""
        if self._cluster.connected:
            if self._here:
                self._end_work()
            for worker in self.workers:
                worker.kill()
            deadline = time.monotonic() + GRACE
            for worker in self.workers:
                wait([worker.sentinel], max(0.0, deadline - time.monotonic()))
        for worker in self.workers:
            worker.close()
        self.workers = []
        self._some.close()
        self._cluster.close()
