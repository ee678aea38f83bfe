"""The trainer's way to all engines of one model."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from wsync.checksum import checksum_of
from wsync.deadlines import NOW, deadline_in, remaining, wait_readable
from wsync.engine.client import EngineClient, EngineError
from wsync.engine.differences import Differences
from wsync.engine.protocol import PauseMode
from wsync.engine.sending import RESUME_TIMEOUT, EngineThread, Job
from wsync.engine.transfers import MakeTransfer
from wsync.errors import SyncTimeout, WorkerDied, WorkerFailed
from wsync.sending.protocols import ConnectionlessChannel
from wsync.transforms.delta import Delta
from wsync.types import Ack
from wsync.weights.binding import require_no_extra
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer, BufferPool

_PROBE = 2.0  # seconds for the first request to an engine, before the next engine is asked


class EngineSendChannel(ConnectionlessChannel):
    """A ``SendChannel`` to engines, its workers: HTTP servers that the user has started.

    All methods are called under the sender's lock, except ``give_up``, and ``_done``, which the engines' threads call.

    Args:
        clients: one for each engine, by index.
        make_transfer: see ``MakeTransfer``.
        pause: see ``EngineThread``.
        timeout: returns the seconds that an update may take; None for no limit.
        delta: makes differences to the versions that engines have; None: full versions are sent.
    """

    def __init__(
        self,
        clients: Sequence[EngineClient],
        make_transfer: MakeTransfer,
        pause: PauseMode | None,
        timeout: Callable[[], float | None],
        delta: Delta | None,
    ) -> None:
        self._timeout = timeout
        self._delta = delta
        self._pid = os.getpid()
        self._engines = [
            EngineThread(worker, client, make_transfer, pause, self._done) for worker, client in enumerate(clients)
        ]
        self._connected: set[int] = set()
        self._given_up: set[int] = set()  # those of ``give_up``, since ``wait_for_workers`` was called
        self._layout: Layout | None = None
        self._pool = BufferPool(torch.device("cpu"))
        self._reserved: set[int] = set()  # slots
        self._latest: dict[int, Job] = {}  # by engine, for one that connects later
        self._lock = threading.RLock()  # guards the next two, which the engines' threads use as well
        self._changed = threading.Condition(self._lock)  # entered as `_lock`: see `VersionState`
        self._submitted: dict[int, Job] = {}  # the newest of each engine, by its index
        self._acks: dict[int, Ack] = {}  # of those jobs

    @property
    def workers(self) -> Collection[int]:
        """See ``SendChannel``."""
        return sorted(self._connected)

    def check_layout(self, layout: Layout, version: int) -> None:
        """See ``SendChannel``: phase init."""
        for worker in self.workers:
            self._submit(worker, Job(version, layout, None, 0, deadline_in(self._timeout())))

    def set_layout(self, layout: Layout) -> None:
        """See ``SendChannel``."""
        self._layout = layout

    def wait_for_workers(self, workers: Collection[int], sentinels: Mapping[int, int], deadline: float | None) -> None:
        """See ``SendChannel``: engines that do not answer yet may be starting.

        Raises:
            SyncTimeout: names the engines that did not answer, and why.
            WorkerDied: ``disconnect`` was called for one that has not answered; or its process has ended, where its
                sentinel is known.
            WorkerFailed: an engine has answered with an error: it refuses the token, or has no such route.
        """
        missing = dict.fromkeys(sorted(set(workers) - self._connected), "")
        self._given_up.clear()
        pause = 0.02
        while missing:
            for worker in list(missing):
                missing[worker] = self._probe(worker, deadline)
                if not missing[worker]:
                    del missing[worker]
                    self._connected.add(worker)
                    if worker in self._latest:
                        self._submit(worker, replace(self._latest[worker], deadline=deadline))
            if gone := dict.fromkeys(missing.keys() & self._given_up, "disconnect() was called before it had answered"):
                raise WorkerDied(f"engine(s) {sorted(gone)}: disconnect() was called", gone)
            left = remaining(deadline)
            if missing and left == 0.0:
                causes = "\n".join(f"worker {worker}: {cause}" for worker, cause in missing.items())
                raise SyncTimeout(f"{len(missing)} engine(s) did not answer in time:\n{causes}", missing)
            if missing:
                watching = {sentinels[worker]: worker for worker in missing if worker in sentinels}
                ended = wait_readable(watching, deadline_in(pause if left is None else min(pause, left)))
                if ended:
                    dead = {watching[fd]: "its process ended before it had answered" for fd in ended}
                    raise WorkerDied(f"engine(s) {sorted(dead)} ended before they had answered", dead)
                pause = min(2 * pause, 0.25)  # for ``give_up``

    def _probe(self, worker: int, deadline: float | None) -> str:
        """Return why an engine cannot be reached; empty if it can."""
        left = remaining(deadline)
        limit = deadline_in(_PROBE if left is None else max(0.01, min(_PROBE, left)))
        with self._engines[worker].client.clone().until(limit) as client:
            try:
                client.get_world_size()
            except EngineError as error:
                if error.status and error.status < 500:
                    raise WorkerFailed(f"worker {worker}: {error}", {worker: str(error)}, failed=(worker,)) from error
                return str(error)
        return ""

    def give_up(self, worker: int) -> None:
        """See ``SendChannel``."""
        self._given_up.add(worker)
        with self._lock:
            job = self._submitted.pop(worker, None)  # so that its outcome, which follows, does not count
            if job is not None:
                self._acks[worker] = Ack(worker, job.version, "disconnect() was called for it", died=True)
                self._changed.notify_all()
        self._engines[worker].give_up()

    def disconnect(self, worker: int) -> None:
        """See ``SendChannel``."""
        self._connected.discard(worker)
        self._engines[worker].disconnect()

    def reserve(self, workers: Collection[int], deadline: float | None) -> Buffer:
        """See ``SendChannel``: a buffer that no engine's thread reads, and that is no engine's newest version."""
        assert self._layout is not None, "set_layout() comes first"
        jobs = [*self._latest.values(), *(job for engine in self._engines for job in engine.jobs)]
        busy = {job.buffer.slot for job in jobs if job.buffer is not None}
        buffer = self._pool.buffer(self._layout, busy | self._reserved)
        self._reserved.add(buffer.slot)
        return buffer

    def newest_views(self) -> Sequence[Tensor] | None:
        """See ``SendChannel``. The buffer of an engine's newest version is never reserved."""
        buffers = [job.buffer for job in self._latest.values()]
        same = len(buffers) == len(self._engines) and all(one is buffers[0] for one in buffers)
        return buffers[0].views if same and buffers[0] is not None else None

    def release(self, buffers: Sequence[Buffer]) -> None:
        """See ``SendChannel``."""
        self._reserved.difference_update(buffer.slot for buffer in buffers)

    def publish(self, buffer: Buffer, version: int, extra: bytes, workers: Collection[int], acknowledge: bool) -> None:
        """See ``SendChannel``: the threads of the engines send it.

        Raises:
            LayoutMismatch: there is extra state.
        """
        require_no_extra(extra, "sent over HTTP")
        assert self._layout is not None, "set_layout() comes first"
        checksum = checksum_of(buffer.flat, b"")
        differences = None if self._delta is None else Differences(self._delta, self._layout, buffer.flat)
        job = Job(version, self._layout, buffer, checksum, deadline_in(self._timeout()), differences)
        for worker in workers:
            self._latest[worker] = job
            if worker in self._connected:
                self._submit(worker, job)
        self._reserved.discard(buffer.slot)

    def _submit(self, worker: int, job: Job) -> None:
        with self._lock:
            self._submitted[worker] = job
            self._acks.pop(worker, None)
        self._engines[worker].submit(job)

    def _done(self, job: Job, ack: Ack) -> None:
        with self._lock:
            if self._submitted.get(ack.worker) is job:  # not the outcome of an attempt that was given up
                self._acks[ack.worker] = ack
                self._changed.notify_all()

    def wait_acks(self, workers: Collection[int], version: int, deadline: float | None) -> list[Ack]:
        """See ``SendChannel``. At the deadline, requests that are still unanswered are given up (not for ``NOW``)."""
        with self._lock:
            while not all(self._answered(worker, version) for worker in workers):
                if not self._changed.wait(remaining(deadline)):
                    break
            answered = [self._acks[worker] for worker in workers if self._answered(worker, version)]
        for worker in set() if deadline == NOW else set(workers) - {ack.worker for ack in answered}:
            client = self._engines[worker].client
            cause = f"{client.url}: phase {client.phase}: no answer before the deadline"
            answered.append(Ack(worker, version, cause, late=True))
            self._engines[worker].give_up()
        self._connected.difference_update(ack.worker for ack in answered if ack.died)
        return answered

    def _answered(self, worker: int, version: int) -> bool:
        return worker in self._acks and self._acks[worker].version >= version

    def carried_bytes(self, version: int) -> int:
        """See ``SendChannel``."""
        if self._delta is not None:
            made = {job.differences for job in self._latest.values() if job.version == version}
            return max((differences.carried for differences in made if differences is not None), default=0)
        return self._layout.nbytes if self._layout else 0

    def close(self, *, finished: bool = False) -> None:
        """See ``SendChannel``: the engines keep their weights. In a forked child nothing: its threads do not exist."""
        if os.getpid() != self._pid:
            return
        for engine in self._engines:
            engine.close()
        deadline = deadline_in(RESUME_TIMEOUT)
        for engine in self._engines:
            engine.join(deadline)
        self._connected.clear()
