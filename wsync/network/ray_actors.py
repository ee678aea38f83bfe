"""Ray actors that a sender drives: calls to them, and the connection to Ray in which they can be called."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from wsync.errors import NotConnected, WeightSyncError, WorkerFailed


class Actors:
    """Actors, by worker index. Ray takes their handles in the connection only in which they were given."""

    def __init__(self, handles: Sequence[ActorHandle] = ()) -> None:
        self._handles = list(handles)
        self._connection = _connection() if handles else None
        self._asked: dict[int, ray.ObjectRef] = {}  # what an actor is yet to do

    def __len__(self) -> int:
        """How many."""
        return len(self._handles)

    @property
    def reachable(self) -> bool:
        """Whether there are any, and this process is connected to Ray as it was when they were given."""
        return self._connection is not None and self._connection == _connection()

    def call(self, worker: int, function: Callable[..., None], *args: Any, retries: int = 0) -> ray.ObjectRef:
        """Have an actor run ``function(itself, *args)``.

        Args:
            worker: its index.
            function: may be run again where the actor dies in it, if there are ``retries``.
            args: for ``function``.
            retries: without them, Ray refuses a call while it starts the actor anew (``max_restarts``); -1: no limit.

        Raises:
            NotConnected: Ray was shut down meanwhile. (A call would start another Ray.)
        """
        self._require()
        return self._handles[worker].__ray_call__.options(max_task_retries=retries).remote(function, *args)

    def ask(self, worker: int, function: Callable[..., None], *args: Any) -> ray.ObjectRef:
        """As ``call``, with retries, whoever waits for it; not once more while the actor is yet to do it.

        Raises:
            NotConnected: as ``call``.
        """
        self._require()
        asked = self._asked.get(worker)
        if asked is None or ray.wait([asked], timeout=0)[0]:
            asked = self._asked[worker] = self.call(worker, function, *args, retries=-1)
        return asked

    def _require(self) -> None:
        if not self.reachable:
            raise NotConnected(
                f"ray.shutdown() was called, and has ended the connection to the {len(self)} actor(s) of this scheme: "
                "give new actors to a new scheme"
            )


def _connection() -> tuple[str, str] | None:
    """Which connection to Ray this process has; None: it has none."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


class Calls:
    """Calls to actors that are under way; a failure wakes whoever waits for the actor."""

    def __init__(self, refs: Mapping[int, ray.ObjectRef]) -> None:
        self._refs = list(refs.values())
        self._lock = threading.Lock()
        self.sentinels = {worker: os.eventfd(0, os.EFD_CLOEXEC) for worker in refs}
        self._errors: dict[int, BaseException] = {}
        for worker, ref in refs.items():
            ref.future().add_done_callback(lambda future, worker=worker: self._done(worker, future.exception()))

    def _done(self, worker: int, error: BaseException | None) -> None:
        with self._lock:
            if error is not None and worker in self.sentinels:
                self._errors[worker] = error
                os.eventfd_write(self.sentinels[worker], 1)

    def explain(self, error: WeightSyncError) -> WeightSyncError:
        """The actors' own errors, where there are any."""
        errors = {worker: str(cause) for worker, cause in self._errors.items()}
        if not errors:
            return error
        lines = "\n".join(f"worker {worker}: {cause}" for worker, cause in sorted(errors.items()))
        return WorkerFailed(f"{len(errors)} actor(s) could not join:\n{lines}", errors)

    def settle(self, timeout: float) -> None:
        """Wait until Ray, too, has heard that all were made; it makes one again whose actor dies before."""
        if self._refs:
            ray.wait(self._refs, num_returns=len(self._refs), timeout=timeout)

    def close(self) -> None:
        """Let the descriptors go."""
        with self._lock:
            descriptors, self.sentinels = self.sentinels, {}
        for descriptor in descriptors.values():
            os.close(descriptor)
