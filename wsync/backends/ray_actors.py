"""Calls to the Ray actors that a sender drives."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import ray
from ray.actor import ActorHandle

from wsync.errors import NotConnected, WorkerFailed


class Actors:
    """Actors by worker index. A handle is valid only in the ``ray.init()`` session in which it was created."""

    def __init__(self, handles: Sequence[ActorHandle]) -> None:
        self._handles = list(handles)
        self._connection = connection()
        self._kept: dict[int, ray.ObjectRef] = {}  # by worker, the last call of ``call_kept``

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._handles)

    @property
    def reachable(self) -> bool:
        """Whether this process has the connection to Ray in which they were given."""
        return self._connection == connection()

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
        """Wait until Ray reports all ``calls`` as finished (also if an actor is dead), or ``timeout`` is over."""
        ray.wait(list(calls), num_returns=len(calls), timeout=timeout)

    def _require_reachable(self) -> None:
        if not self.reachable:
            raise NotConnected(
                f"ray.shutdown() was called, and has ended the connection to the {len(self)} actor(s) of this scheme: "
                "give new actors to a new scheme"
            )


def connection() -> tuple[str, str] | None:
    """Return which connection to Ray this process has; None for none."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


class ActorCalls:
    """Calls to actors that are in progress; a failure makes the worker's sentinel readable."""

    def __init__(self, refs: Mapping[int, ray.ObjectRef]) -> None:
        self._lock = threading.Lock()
        self.sentinels = {worker: os.eventfd(0, os.EFD_CLOEXEC) for worker in refs}
        self._ends: dict[int, Future[None]] = {worker: ref.future() for worker, ref in refs.items()}
        for worker, end in self._ends.items():
            end.add_done_callback(lambda end, worker=worker: self._done(worker, end.exception()))

    def _done(self, worker: int, error: BaseException | None) -> None:
        """Make the sentinel of a call that has failed readable. Called by a thread of Ray."""
        with self._lock:
            if error is not None and worker in self.sentinels:
                os.eventfd_write(self.sentinels[worker], 1)

    def raise_failures(self) -> None:
        """Raise the actors' own errors.

        Raises:
            WorkerFailed: calls have failed.
        """
        causes = {worker: end.exception() for worker, end in sorted(self._ends.items()) if end.done()}
        errors = {worker: str(cause) for worker, cause in causes.items() if cause is not None}
        if errors:
            lines = "\n".join(f"worker {worker}: {cause}" for worker, cause in errors.items())
            raise WorkerFailed(f"{len(errors)} actor(s) could not join:\n{lines}", errors)

    def settle(self, timeout: float) -> None:
        """Wait until Ray has noticed that all calls are finished; it repeats a call if the actor dies before that."""
        wait(self._ends.values(), timeout)

    def close(self) -> None:
        """Close the sentinels."""
        with self._lock:
            descriptors, self.sentinels = self.sentinels, {}
        for descriptor in descriptors.values():
            os.close(descriptor)
