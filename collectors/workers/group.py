"""The workers of a collector, as the thread that gathers and the threads that deliver weights use them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import wsync
from collectors.worker import WorkerOptions
from collectors.workers.pool import WorkerHandle
from collectors.workers.records import FailureCause, RestartBackoff, WorkerRecord, WorkerState
from collectors.workers.supervisor import WorkerSupervisor

T = TypeVar("T")
Send = Callable[[Any, Any], T]
"""``send(weights, worker_ids)``, as ``WeightSyncScheme.send``; of several schemes, with ``{scheme: weights}``."""

_STOP_GRACE = 2.0  # seconds in which a batch has to be complete after ``interrupt``
_CLOSE_GRACE = 2.0  # seconds in which a thread that gathers or updates has to notice ``close``
_ERROR_GRACE = 2.0  # seconds in which a worker that has left a scheme has to report its error


class WorkerGroup(WorkerSupervisor):
    """A collector's operations on all workers. One thread may gather while other threads deliver weights."""

    def build(self, specs: Sequence[bytes], options: Sequence[WorkerOptions]) -> None:
        """Build all workers. Called once, before any other method.

        Raises:
            WorkerDied, WorkerFailed, SyncTimeout: a worker failed, whatever the failure policy.
        """
        policy = self.failure_policy
        self._records = [
            WorkerRecord(options[worker.worker_idx], specs[worker.worker_idx], RestartBackoff(policy), worker)
            for worker in self.pool.workers
        ]
        for record in self._records:
            self._build(record)
        self._step_until(WorkerState.READY)
        if policy.on_failure != "restart":  # there are no successors, and each specification may have a large policy
            for record in self._records:
                record.spec = b""

    def ask(self, question: str, argument: Any = None) -> list[Any]:
        """Ask all workers; return their answers, by index: see ``RolloutWorker.execute``.

        Called between ``build`` and ``connect``.

        Raises:
            WorkerDied, WorkerFailed, SyncTimeout: a worker failed, whatever the failure policy.
        """
        self._answers.clear()
        for record in self._records:
            assert record.worker is not None, "no worker has failed yet"
            self._send(record.worker, "ask", (question, argument))
        while len(self._answers) < len(self._records):
            self._step()
        return [self._answers[record.index] for record in self._records]

    def connect(self) -> None:
        """Connect all workers by the schemes that there are now. Called once, after ``build`` and ``ask``.

        Raises:
            WorkerDied, WorkerFailed, SyncTimeout: a worker failed, whatever the failure policy.
        """
        for record in self._records:
            self._connect(record)
        for scheme in self.schemes.values():
            try:
                scheme.connect()
            except (wsync.WorkerDied, wsync.SyncTimeout) as error:
                self.raise_worker_error(error)
                raise
        self._step_until(WorkerState.ACTIVE)
        self._started = True

    def _step_until(self, state: WorkerState) -> None:
        while any(record.state is not state for record in self._records):
            self._step()

    # --- for the thread that gathers ---

    def wait_for_workers(self) -> list[WorkerHandle]:
        """Return the active workers; wait for one if there is none.

        Raises:
            WorkerDied, WorkerFailed, SyncTimeout: a failure that the policy raises.
        """
        with self._lock.gathering():
            if any(record.state not in (WorkerState.ACTIVE, WorkerState.DROPPED) for record in self._records):
                self._step(wait_for_events=False)
            while not (active := self.active_workers):
                self._step()
            return active

    def collect(self, worker: WorkerHandle, buffer: int) -> None:
        """Have ``worker`` fill a buffer; do nothing if it was replaced."""
        with self._lock.gathering():
            self._send(worker, "collect", buffer)

    def next_batch(self, awaited: Collection[WorkerHandle]) -> tuple[WorkerHandle, int] | None:
        """Return the next batch: its worker, which may have failed since, and the buffer.

        None if another event came, or if none of ``awaited`` is active (any more): an update in another thread may have
        failed them since the caller looked.

        Raises:
            WorkerDied, WorkerFailed, SyncTimeout: see ``wait_for_workers``.
        """
        with self._lock.gathering():
            if not self._batches and any(worker in awaited for worker in self.active_workers):
                self._step()
            return self._batches.popleft() if self._batches else None

    def batch_begun(self) -> None:
        """Limit the batch that begins now, from now on, if ``interrupt`` was called between two batches.

        A signal may come after this thread has last looked for a request to stop.
        """
        if self._stop_at is not None:
            self._stop_at = time.monotonic() + _STOP_GRACE

    def batch_completed(self) -> None:
        """Forget an ``interrupt``: the batch that it was for is complete."""
        self._stop_at = None

    def seed(self, seed: int) -> int:
        """Seed every worker; return the next free seed, which restarted workers take."""
        with self._lock.gathering():
            for record in self._records:
                if record.worker is not None and record.active:
                    self.pool.send(record.worker, "seed", seed)
                seed += record.num_envs
            self._next_seed = seed
            return seed

    def resume(self, frames: int) -> None:
        """Count ``frames`` of an earlier run, evenly for each worker: fewer random frames are left."""
        share = -(-frames // len(self._records))
        with self._lock.gathering():
            for record in self._records:
                record.frames = share
                if record.worker is not None and record.active:
                    self.pool.send(record.worker, "resume", share)

    # --- for threads that deliver weights ---

    def deliver(self, send: Send[T], weights: Any, worker_ids: int | Sequence[int] | None) -> T | None:
        """Call ``send(weights, worker_ids)``, and again for the other workers where a failure prevented it.

        For the policies ``drop`` and ``restart``. With ``raise``, ``send`` is called directly, and
        ``raise_worker_error`` after an error.

        Returns:
            What ``send`` has returned; None if a worker failed meanwhile, and the others have the update.

        Raises:
            WorkerFailed: a model refused the weights.
            Exception: whatever ``send`` raises, except deaths and timeouts that the failure policy handles.
        """
        everyone = range(len(self._records))
        wanted = everyone if worker_ids is None else wsync.worker_list(worker_ids, len(everyone))
        if not wanted:
            return send(weights, worker_ids)  # raises the error for an empty selection
        with self._lock.updating():
            while True:
                made, result = self._deliver(send, weights, wanted, to_all=worker_ids is None)
                if made:
                    return result

    def _deliver(self, send: Send[T], weights: Any, wanted: Collection[int], *, to_all: bool) -> tuple[bool, T | None]:
        """Return whether an update was made, for at least one worker; and what ``send`` has returned."""
        reachable = self._reachable(wanted, wait_for_all=not to_all)
        try:
            if to_all:
                return True, send(weights, None)  # the scheme keeps it for workers that are being restarted
            return True, send(_weights_for(weights, reachable), reachable)
        except (wsync.WorkerDied, wsync.SyncTimeout) as error:
            if not self._fail_unreached(reachable, error) and error.version is None:
                raise
            return error.version is not None, None

    def _reachable(self, wanted: Collection[int], *, wait_for_all: bool) -> list[int]:
        """Return those of ``wanted`` that get updates; wait for one, or for all of them that were not dropped."""
        while True:
            left = [worker for worker in wanted if self._records[worker].state is not WorkerState.DROPPED]
            if not left:
                causes = dict.fromkeys(wanted, "was dropped")
                raise wsync.WorkerDied(f"worker(s) {sorted(wanted)} were dropped: no worker is left to send to", causes)
            reachable = [worker for worker in left if self._records[worker].gets_updates]
            if reachable and (len(reachable) == len(left) or not wait_for_all):
                return reachable
            self._step()

    def _fail_unreached(self, addressed: Collection[int], error: wsync.WorkerDied | wsync.SyncTimeout) -> bool:
        """Fail the workers that an update did not reach; return whether there were any."""
        unreached = [worker for worker in addressed if worker in error.workers and worker not in error.failed]
        for record in [self._records[worker] for worker in unreached]:
            if record.worker is not None:
                self._error_of(record.worker, _patience_after(error))
        # Before workers are failed below: finished batches are still delivered, and a traceback is the better cause.
        self._handle_events()
        for worker in unreached:
            record, detail = self._records[worker], error.workers[worker].strip()
            if record.gets_updates:
                self._fail(record, FailureCause(type(error), worker, f"lacks an update: {detail}"))
        if error.failed:
            failed = {worker: error.workers[worker] for worker in error.failed}
            raise wsync.WorkerFailed(str(error), failed, error.version, failed) from error
        return bool(unreached)

    def raise_worker_error(self, error: wsync.WorkerDied | wsync.SyncTimeout) -> None:
        """Raise the error of a worker that an update did not reach, if the worker has reported one.

        For the policy ``raise``; returns if no worker has reported an error. A death ends the collector.

        Raises:
            WorkerFailed: the worker's own error, which is the better cause.
        """
        died = isinstance(error, wsync.WorkerDied)
        if died or error.version is not None:
            self.failures.failed |= Counter(error.workers.keys() - error.failed)  # each once
        with self._lock.updating():
            if self.ended_by_failure or self.closing:
                return  # another thread has raised it, or has shut the collector down
            for index in error.workers:
                record = self._records[index]
                if record.worker is not None:
                    cause = self._error_of(record.worker, _patience_after(error))
                    if cause is not None:
                        self._fail(record, cause)
            self.ended_by_failure = died

    # --- for any thread ---

    def interrupt(self) -> None:
        """Limit the wait for the current batch, or the next one, to ``_STOP_GRACE`` seconds.

        May be called from a signal handler.
        """
        self._stop_at = time.monotonic() + _STOP_GRACE
        self._lock.wakeup.set()

    def close(self) -> None:
        """End all workers, those that are being restarted at once. Idempotent.

        In a thread that waits for a batch meanwhile, ``NotConnected`` is raised.
        """
        self.closing = True
        with self._lock.ending(_CLOSE_GRACE):
            for record in self._records:
                if self._started and record.worker is not None and not record.active:
                    self.pool.discard(record.worker)
                    record.worker = None
            self.pool.close()
            self._lock.wakeup.close()


def _patience_after(error: wsync.WeightSyncError) -> float:
    """Seconds to wait for the error report of a worker that an update did not reach; a late one sends none."""
    return _ERROR_GRACE if isinstance(error, wsync.WorkerDied) else 0.0


def _weights_for(weights: Any, workers: Collection[int]) -> Any:
    """Restrict per-worker weights to ``workers``; of several schemes, those of each."""
    if isinstance(weights, dict) and all(isinstance(key, wsync.WeightSyncScheme) for key in weights):
        return {scheme: _weights_for(one, workers) for scheme, one in weights.items()}
    by_worker = wsync.per_worker(weights)
    return weights if by_worker is None else {worker: by_worker[worker] for worker in workers if worker in by_worker}
