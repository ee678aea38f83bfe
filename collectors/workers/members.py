"""Who takes part in collecting, for whoever gathers batches from them, and for whoever brings them weights."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import wsync
from collectors.updating import Send
from collectors.workers.place import Place, W, WorkerState
from collectors.workers.recovery import Cause, RestartBackoff
from collectors.workers.supervisor import Supervisor
from collectors.workers.worker import WorkerOptions

_STOP = 2.0  # seconds in which a batch under way has to be complete once somebody has asked to stop
_LAST_WORDS = 2.0  # seconds in which a worker that has hung up on a scheme has to say why: a call is answered later


class Members(Supervisor[W]):
    """All workers. One thread may gather while others bring weights."""

    def start(self, parts: Sequence[bytes], options: Sequence[WorkerOptions]) -> None:
        """Build and connect all workers; whatever fails now is raised."""
        self._places = [
            Place(options[worker.worker_idx], parts[worker.worker_idx], RestartBackoff(self.failure_policy), worker)
            for worker in self.pool.workers
        ]
        for place in self._places:
            self._build(place)
        self._step_until(WorkerState.READY)
        for place in self._places:
            self._connect(place)
        for scheme in self.schemes.values():
            scheme.connect()
        self._step_until(WorkerState.THERE)
        self._started = True

    def _step_until(self, state: WorkerState) -> None:
        while any(place.state is not state for place in self._places):
            self._step()

    # --- for whoever gathers ---

    def muster(self) -> list[W]:
        """Take in who has come back; then the workers that take part. If there is none, wait for the first.

        Raises:
            WorkerDied, WorkerFailed, SyncTimeout: one has failed, and that is not to be borne (any more).
        """
        with self._turns.gathering():
            if any(place.state not in (WorkerState.THERE, WorkerState.DROPPED) for place in self._places):
                self._step(at_once=True)
            while not (there := self.there):
                self._step()
            return there

    def tell(self, worker: W, command: str, argument: Any) -> None:
        """Give a command that is answered; nothing happens if another one has the worker's place by now."""
        with self._turns.gathering():
            self._tell(worker, command, argument)

    def hear(self) -> tuple[W, int] | None:
        """The next batch: whose (it may be gone by now), and in which buffer. None: something else has happened.

        Raises:
            WorkerDied, WorkerFailed, SyncTimeout: as ``muster``.
        """
        with self._turns.gathering():
            if not self._batches:
                self._step()
            return self._batches.popleft() if self._batches else None

    def seed(self, seed: int) -> int:
        """Seed every worker; the next free seed, which successors go on from."""
        with self._turns.gathering():
            for place in self._places:
                if place.worker is not None and place.state is WorkerState.THERE:
                    self.pool.tell([place.worker], "seed", seed)
                seed += place.num_envs
            self._next_seed = seed
            return seed

    def resume(self, frames: int) -> None:
        """An earlier run has had so many frames: fewer random ones are left, for each worker and its successors."""
        share = -(-frames // len(self._places))
        with self._turns.gathering():
            for place in self._places:
                place.frames = share
                if place.worker is not None and place.state is WorkerState.THERE:
                    self.pool.tell([place.worker], "resume", share)

    # --- for whoever brings weights ---

    def deliver(self, send: Send, weights: Any, worker_ids: int | Sequence[int] | None) -> None:
        """``send(weights, worker_ids)``, and again to the others if somebody's failure has kept it from all of them.

        For a failure policy that bears it; where none is borne ``send`` does it, and ``blame`` after an error.

        Raises:
            WorkerFailed: a model refused the weights.
            Exception: whatever ``send`` raises, but for deaths and timeouts that the failure policy takes care of.
        """
        wanted = self._named(worker_ids)
        if not wanted:
            send(weights, worker_ids)  # which says so
            return
        with self._turns.visiting():
            while not self._deliver(send, weights, wanted, everybody=worker_ids is None):
                pass

    def blame(self, error: wsync.WorkerDied | wsync.SyncTimeout) -> None:
        """An update did not reach somebody, and that is not borne.

        Raises:
            WorkerDied, WorkerFailed, SyncTimeout: what such a worker has raised itself: that is the better cause.
        """
        if error.version is not None:
            self.failures.failed |= Counter(error.workers.keys() - error.refused)  # each once
        with self._turns.visiting():
            if self.over or self._turns.closed:
                return  # another thread has raised it, or ended the workers
            for index in error.workers:
                place = self._places[index]
                raised = None if place.worker is None else self._hear_out(place.worker, _patience_after(error))
                if raised is not None:
                    self._fail(place, Cause.of(index, "error", raised))

    def _named(self, worker_ids: int | Sequence[int] | None) -> Sequence[int]:
        everyone = range(len(self._places))
        return everyone if worker_ids is None else wsync.worker_list(worker_ids, len(everyone))

    def _deliver(self, send: Send, weights: Any, wanted: Collection[int], *, everybody: bool) -> bool:
        """Whether somebody was given it."""
        there = self._reachable(wanted)
        try:
            if everybody:
                send(weights, None)  # what is for all is kept for who is away
            else:
                send(_share(weights, there), there)
        except (wsync.WorkerDied, wsync.SyncTimeout) as error:
            if not self._lose(there, error) and error.version is None:
                raise
            return error.version is not None
        return True

    def _reachable(self, wanted: Collection[int]) -> list[int]:
        """Those among ``wanted`` that get updates; if there is none, wait for the first."""
        while not (there := [worker for worker in wanted if self._places[worker].gets_updates]):
            if all(self._places[worker].state is WorkerState.DROPPED for worker in wanted):
                causes = dict.fromkeys(wanted, "was dropped")
                raise wsync.WorkerDied(f"worker(s) {sorted(wanted)} were dropped: there is nobody to send to", causes)
            self._step()
        return there

    def _lose(self, addressed: Collection[int], error: wsync.WorkerDied | wsync.SyncTimeout) -> bool:
        """Give up those whom an update did not reach; whether there were any."""
        lost = [worker for worker in addressed if worker in error.workers and worker not in error.refused]
        for place in [self._places[worker] for worker in lost]:
            if place.worker is not None:
                self._hear_out(place.worker, _patience_after(error))
        self._attend()  # batches that they have finished are not lost; and what they say themselves is the better cause
        for worker in lost:
            place, detail = self._places[worker], error.workers[worker].strip()
            if place.gets_updates:
                self._fail(place, Cause(type(error), f"worker {worker} lacks an update: {detail}", detail))
        if error.refused:
            refused = {worker: error.workers[worker] for worker in error.refused}
            raise wsync.WorkerFailed(str(error), refused, error.version, refused) from error
        return bool(lost)

    # --- what happens ---

    def interrupt(self) -> None:
        """Bear with workers for ``_STOP`` more seconds; harmless in a signal handler."""
        self._stop_at = time.monotonic() + _STOP
        self._turns.call()

    def complete(self) -> None:
        """A batch is: whoever has asked to stop has got what was under way, and the next one may take its time."""
        self._stop_at = None

    def close(self) -> None:
        """End the workers; harmless when repeated. Successors that are being built are not waited for."""
        for place in self._places:
            if self._started and place.worker is not None and place.state is not WorkerState.THERE:
                self.pool.let_go(place.worker)
                place.worker = None
        self.pool.close()
        self._turns.close()


def _patience_after(error: wsync.WeightSyncError) -> float:
    """Seconds to wait for the word of a worker that an update did not reach; one that is late says nothing."""
    return _LAST_WORDS if isinstance(error, wsync.WorkerDied) else 0.0


def _share(weights: Any, workers: Collection[int]) -> Any:
    """Of weights per worker, those of the ``workers`` that there are; of several models, of each."""
    if isinstance(weights, dict) and all(isinstance(key, wsync.WeightSyncScheme) for key in weights):
        return {scheme: _share(one, workers) for scheme, one in weights.items()}
    apart = wsync.per_worker(weights)
    return weights if apart is None else {worker: apart[worker] for worker in workers if worker in apart}
