"""The trainer's side of one engine: a thread that takes each version through the phases of the protocol."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from wsync.deadlines import deadline_in, remaining
from wsync.engine.client import EngineClient, EngineError
from wsync.engine.differences import Base, Differences
from wsync.engine.protocol import NOT_INITIALISED, PauseMode
from wsync.engine.transfers import EngineTransfer, MakeTransfer, VersionSource
from wsync.types import Ack
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer

RESUME_TIMEOUT = 5.0
"""Seconds in which an engine is resumed after an update has failed."""


@dataclass(frozen=True, slots=True)
class Job:
    """A version for one engine.

    Attributes:
        version: its number.
        layout: the layout of the weights.
        buffer: the packed tensors; None: only ask the engine whether the layout fits.
        checksum: the checksum of the packed bytes.
        deadline: on ``time.monotonic``.
        differences: to older versions; None: the full version is sent.
    """

    version: int
    layout: Layout
    buffer: Buffer | None
    checksum: int
    deadline: float | None
    differences: Differences | None = None


class EngineThread:
    """Sends versions to one engine, one after the other; a newer one takes the place of one that waits.

    All methods but ``give_up`` and the thread's own are called under the sender's lock.

    Args:
        worker: the engine's index.
        client: calls it.
        make_transfer: makes what carries the weights.
        pause: pause generation meanwhile; None: do not.
        done: called by the thread with each job that it has begun, and the outcome.
    """

    def __init__(
        self,
        worker: int,
        client: EngineClient,
        make_transfer: MakeTransfer,
        pause: PauseMode | None,
        done: Callable[[Job, Ack], None],
    ) -> None:
        self.client = client
        self._worker = worker
        self._make_transfer = make_transfer
        self._pause: PauseMode | None = pause
        self._done = done
        # `with self._lock`, not `with self._changed`: see `VersionState`. It guards what follows, but for `_transfer`.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: Job | None = None
        self._running: Job | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._transfer: tuple[Layout, VersionSource, EngineTransfer] | None = None  # the thread's own
        self._disconnected = False  # since the thread began the last job
        # the last version this engine installed, the base of the next difference; None: send it whole
        self._delivered: Job | None = None

    @property
    def jobs(self) -> Sequence[Job]:
        """The jobs that are being sent, or wait, and the base of differences: their tensors are read."""
        with self._lock:
            return [job for job in (self._running, self._waiting, self._delivered) if job is not None]

    def submit(self, job: Job) -> None:
        """Have the thread send a version."""
        with self._lock:
            self._waiting = job
            if self._thread is None:
                name = f"wsync-engine-{self._worker}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                try:
                    self._thread.start()  # after Ctrl-C in it the thread runs, and no second one is started
                except RuntimeError:  # the limit of threads
                    self._thread = None
                    raise
            self._changed.notify()

    def give_up(self) -> None:
        """Give up the version that is being sent, and the one that waits."""
        with self._lock:
            self._give_up()

    def _give_up(self) -> None:
        self._waiting = None
        if self._running is not None:
            self.client.abort()

    def disconnect(self) -> None:
        """``give_up``; the engine may be started again, so the next version begins with a new transfer."""
        with self._lock:
            self._disconnected = True
            self._give_up()

    def close(self) -> None:
        """Have the thread end; ``join`` waits for that. Idempotent."""
        with self._lock:
            self._closed = True
            self._give_up()
            self._changed.notify()

    def join(self, deadline: float | None) -> None:
        """Wait until the thread has ended."""
        if self._thread not in (None, threading.current_thread()):  # the latter may run the finalizer of a scheme
            self._thread.join(remaining(deadline))

    # --- the thread ---

    def _run(self) -> None:
        while True:
            with self._lock:
                self._running = None
                while self._waiting is None:
                    if self._closed:
                        self.client.close()
                        return
                    self._changed.wait()
                job = self._running = self._waiting
                self._waiting = None
                self.client.deadline, self.client.version = job.deadline, job.version  # `abort` may follow at once
                if self._disconnected:
                    self._transfer, self._delivered, self._disconnected = None, None, False
            ack = self._attempt(job)
            self.client.close()
            with self._lock:
                self._running = None
                if self._transfer is None:
                    self._delivered = None
                elif not ack.error and job.differences is not None:
                    self._delivered = job
            self._done(job, ack)

    def _attempt(self, job: Job) -> Ack:
        try:
            try:
                self._send(job)
            except EngineError as error:
                if error.reason != NOT_INITIALISED:
                    raise
                self._transfer = self._delivered = None  # the engine has been started again
                self._send(job)
        except EngineError as error:
            if error.died:
                self._transfer = None  # another engine may take its place
            return Ack(self._worker, job.version, str(error), died=error.died, late=error.late)
        except BaseException:  # noqa: BLE001  a user's transfer may raise anything; the trainer raises WorkerFailed
            where = f"{self.client.url}: phase {self.client.phase}"
            return Ack(self._worker, job.version, f"{where}:\n{traceback.format_exc()}")
        wait, apply = (self.client.finish_answer.get(name) for name in ("wait_seconds", "apply_seconds"))
        return Ack(
            self._worker,
            job.version,
            wait=wait if isinstance(wait, float) else 0.0,
            apply=apply if isinstance(apply, float) else 0.0,
        )

    def _send(self, job: Job) -> None:
        source, transfer = self._initialised(job.layout)
        if job.buffer is None:
            return
        source.views, source.checksum, source.differences = job.buffer.views, job.checksum, job.differences
        base = self._delivered
        source.base = None if base is None or base.buffer is None else Base(base.version, base.buffer.flat)
        try:
            if self._pause is not None:
                self.client.pause(self._pause)
            transfer.send_weights()
            if self._pause is not None:
                self.client.resume()
        except BaseException:
            if self._pause is not None:
                self._resume_after_failure()
            raise
        finally:
            source.views, source.base, source.differences = (), None, None

    def _initialised(self, layout: Layout) -> tuple[VersionSource, EngineTransfer]:
        """Phase 1, for a new layout."""
        if self._transfer is None or self._transfer[0] != layout:
            self._transfer = self._delivered = None
            source = VersionSource(layout)
            self.client.phase = "init"
            self._transfer = layout, source, self._make_transfer(self.client, source)
        return self._transfer[1:]

    def _resume_after_failure(self) -> None:
        """Do not leave the engine paused. The error that is being raised is the one to report.

        By a client of its own, which ``abort`` does not reach.
        """
        with self.client.clone().until(deadline_in(RESUME_TIMEOUT)) as client, suppress(EngineError):
            client.resume()
