"""Calls to the Ray actors that a sender drives."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from wsync.errors import NotConnected, WeightSyncError, WorkerFailed


class Actors:
    """Actors by worker index. A handle is valid only in the ``ray.init()`` session in which it was created."""

    def __init__(self, handles: Sequence[ActorHandle]) -> None:
        self._handles = list(handles)
        self._connection = _connection()
        self._kept: dict[int, ray.ObjectRef] = {}  # by worker, the last call of ``call_kept``

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._handles)

    @property
    def reachable(self) -> bool:
        """Whether this process has the connection to Ray in which they were given."""
        return self._connection == _connection()

    def call(self, worker: int, function: Callable[..., None], *args: Any, retries: int = 0) -> ray.ObjectRef:
        """Have an actor run ``function(itself, *args)``.

        Args:
            worker: its index.
            function: called with the actor's object first.
            args: for ``function``.
            retries: how often Ray may run it again if the actor dies; -1: no limit. With 0 Ray refuses calls while it
                restarts the actor (``max_restarts``).

        Raises:
            NotConnected: Ray was shut down meanwhile. (A call would start another Ray.)
        """
        self._require_reachable()
        return self._handles[worker].__ray_call__.options(max_task_retries=retries).remote(function, *args)

    def pending(self, worker: int) -> ray.ObjectRef | None:
        """Return the last call of ``call_kept``; None if it has finished, or there was none.

        Raises:
            NotConnected: see ``call``.
        """
        self._require_reachable()
        last = self._kept.get(worker)
        return None if last is None or ray.wait([last], timeout=0)[0] else last

    def call_kept(self, worker: int, function: Callable[..., None], *args: Any) -> ray.ObjectRef:
        """As ``call``, with retries; for ``pending``."""
        call = self._kept[worker] = self.call(worker, function, *args, retries=-1)
        return call

    def wait(self, calls: Sequence[ray.ObjectRef], timeout: float) -> None:
        """Wait until Ray reports all ``calls`` as finished, or ``timeout`` seconds have passed."""
        ray.wait(list(calls), num_returns=len(calls), timeout=timeout)

    def _require_reachable(self) -> None:
        if not self.reachable:
            raise NotConnected(
                f"ray.shutdown() was called, and has ended the connection to the {len(self)} actor(s) of this scheme: "
                "give new actors to a new scheme"
            )


def _connection() -> tuple[str, str] | None:
    """Return which connection to Ray this process has; None for none."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


class ActorCalls:
    """Calls to actors that are in progress; a failure makes the worker's sentinel readable."""

    def __init__(self, refs: Mapping[int, ray.ObjectRef]) -> None:
        self._refs = list(refs.values())
        self._lock = threading.Lock()
        self.sentinels = {worker: os.eventfd(0, os.EFD_CLOEXEC) for worker in refs}
        self._errors: dict[int, BaseException] = {}
        for worker, ref in refs.items():
            ref.future().add_done_callback(lambda future, worker=worker: self._done(worker, future.exception()))

    def _done(self, worker: int, error: BaseException | None) -> None:
        """Record the end of a call. Called by a thread of Ray."""
        with self._lock:
            if error is not None and worker in self.sentinels:
                self._errors[worker] = error
                os.eventfd_write(self.sentinels[worker], 1)

    def explain(self, error: WeightSyncError) -> WeightSyncError:
        """Return the actors' own errors, if there are any; else ``error``."""
        with self._lock:
            errors = {worker: str(cause) for worker, cause in self._errors.items()}
        if not errors:
            return error
        lines = "\n".join(f"worker {worker}: {cause}" for worker, cause in sorted(errors.items()))
        return WorkerFailed(f"{len(errors)} actor(s) could not join:\n{lines}", errors)

    def settle(self, timeout: float) -> None:
        """Wait until Ray has noticed that all calls are finished; it repeats a call if the actor dies before that."""
        if self._refs:
            ray.wait(self._refs, num_returns=len(self._refs), timeout=timeout)

    def close(self) -> None:
        """Close the sentinels."""
        with self._lock:
            descriptors, self.sentinels = self.sentinels, {}
        for descriptor in descriptors.values():
            os.close(descriptor)
