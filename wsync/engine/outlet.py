"""The trainer's way to engines: HTTP servers that the user has started, as the workers of one sender.

Everything but the ``Outlet`` methods of ``Engines`` runs in the control thread.
"""

from __future__ import annotations

import asyncio
import secrets
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from wsync.control.loop import control_loop, run_blocking
from wsync.control.processes import Processes, watched
from wsync.control.session import checksum_of
from wsync.deadlines import NOW, deadline_in, earlier, remaining
from wsync.engine.client import EngineClient, EngineError
from wsync.engine.protocol import NOT_INITIALISED, PAUSE, RESUME, PauseMode
from wsync.engine.transfers import BodyTransfer, Differences, MakeTransfer, VersionSource
from wsync.errors import LayoutMismatch, SyncTimeout, WorkerDied, WorkerFailed
from wsync.transforms.delta import Delta
from wsync.update import Cause, Outlet, Stage, Update
from wsync.weights.binding import require_no_extra
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer, BufferPool

T = TypeVar("T")
_PROBE = 2.0  # seconds for one request to an engine that may be starting
_SHORTEST, _LONGEST = 0.02, 0.25  # seconds between two of them
_RESUME_TIMEOUT = 5.0  # seconds in which an engine is resumed after an update has failed


@dataclass(frozen=True, eq=False)
class Job:
    """A version for some engines; without ``update``, only the question whether weights of the layout fit."""

    layout: Layout
    deadline: float | None
    update: Update | None = None
    differences: Differences | None = None


class Engine:
    """One engine. Versions are sent one after the other; a newer one takes the place of one that waits.

    Attributes:
        present: whether it is connected.
        cause: why it is not, if it was.
        latest: the newest version for its index, also while it is absent.
        costs: seconds of waiting and of loading, and bytes, of its last update.
        connecting: waits until it answers, in ``connect``.
    """

    def __init__(
        self,
        client: EngineClient,
        make_transfer: MakeTransfer | None,
        chunk_bytes: int,
        pause: PauseMode | None,
        *,
        delta: bool,
    ) -> None:
        self.client = client
        self.present = False
        self.cause = ""
        self.latest: Job | None = None
        self.costs = 0.0, 0.0, 0
        self.connecting: asyncio.Task[str] | None = None
        self._make_transfer, self._chunk_bytes = make_transfer, chunk_bytes
        self._pause, self._delta = pause, delta
        self._result: asyncio.Future[Cause | None] | None = None  # of the newest version
        self._waiting: tuple[Job, asyncio.Future[Cause | None]] | None = None
        self._attempt: asyncio.Task[Cause | None] | None = None
        self._running: asyncio.Task[None] | None = None
        self._transfer: tuple[Layout, VersionSource, Any] | None = None
        self._delivered: Update | None = None  # the version that it has; None: the next one is sent whole

    def submit(self, job: Job) -> None:
        """Send a version, once the one before has ended. An engine that is absent has died."""
        self._result = asyncio.get_running_loop().create_future()
        if not self.present:
            return self._result.set_result(Cause("died", self.cause))
        self._waiting = job, self._result
        if self._running is None:
            self._running = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while self._waiting is not None:
            (job, result), self._waiting = self._waiting, None
            self._attempt = asyncio.ensure_future(self.attempt(job))
            await asyncio.wait([self._attempt])
            cause = self._late() if self._attempt.cancelled() else self._attempt.result()
            if cause is None and job.differences is not None:
                self._delivered = job.update
            if cause is not None and cause.kind == "died":
                self._forget(cause.text)
            if not result.done():
                result.set_result(cause)
        self._running = self._attempt = None

    def _late(self) -> Cause:
        return Cause("late", f"{self.client.url}: phase {self.client.phase}: no answer before the deadline")

    async def outcome(self, deadline: float | None) -> Cause | None:
        """Wait for the outcome of the newest version; at the deadline, give it up (not at ``NOW``)."""
        if self._result is None:
            return None
        with suppress(TimeoutError):
            async with asyncio.timeout(remaining(deadline)):
                return await asyncio.shield(self._result)
        cause = self._late()
        if deadline != NOW:
            self._give_up(cause)
        return cause

    def _give_up(self, cause: Cause) -> None:
        """Give up the version that is being sent, and the one that waits."""
        self._waiting = None
        if self._result is not None and not self._result.done():
            self._result.set_result(cause)
        if self._attempt is not None:
            self._attempt.cancel()

    def _forget(self, cause: str) -> None:
        """Treat the engine as absent: it may be started again, so its next version begins with a new transfer."""
        self.present, self.cause, self._transfer, self._delivered = False, cause, None, None

    def disconnect(self, cause: str) -> None:
        """Treat the engine as dead; what waits for it is told so."""
        self._forget(cause)
        if self.connecting is not None:
            self.connecting.cancel("disconnect() was called before it had answered")
        self._give_up(Cause("died", cause))

    async def close(self) -> None:
        """End what is being sent; wait until it has ended, for some seconds."""
        self._give_up(Cause("died", "the sender was shut down"))
        if self._running is not None:
            await asyncio.wait([self._running], timeout=_RESUME_TIMEOUT)
        await self.client.close()

    async def probe(self, worker: int, deadline: float | None) -> str:
        """Wait until the engine answers; return why it did not before the deadline.

        Raises:
            WorkerFailed: its answer is an error. WorkerDied: this was cancelled, with a cause.
        """
        pause, cause = _SHORTEST, ""
        try:
            while True:
                self.client.deadline = earlier(deadline, deadline_in(_PROBE))
                try:
                    await self.client.world_size()
                    return ""
                except EngineError as error:
                    if 0 < error.status < 500:
                        raise WorkerFailed(f"worker {worker}: {error}", {worker: str(error)}, None, [worker]) from error
                    cause = cause if error.kind == "late" and cause else str(error)
                if remaining(deadline) == 0.0:
                    return cause
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST)
        except asyncio.CancelledError as error:
            if not error.args:
                raise
            raise WorkerDied(f"engine(s) [{worker}]: {error.args[0]}", {worker: error.args[0]}) from None

    # --- one attempt ---

    async def attempt(self, job: Job) -> Cause | None:
        """Send a version; return why that has failed."""
        client = self.client
        client.deadline, client.version = job.deadline, 0 if job.update is None else job.update.version
        try:
            async with asyncio.timeout(remaining(job.deadline)):
                try:
                    await self._send(job)
                except EngineError as error:
                    if error.reason != NOT_INITIALISED:
                        raise
                    self._transfer = self._delivered = None  # the engine has been started again
                    await self._send(job)
        except EngineError as error:
            return Cause(error.kind, str(error))
        except TimeoutError:
            return self._late()
        except Exception:  # noqa: BLE001  a user's transfer raises anything; the trainer raises WorkerFailed
            return Cause("failed", f"{client.url}: phase {client.phase}:\n{traceback.format_exc()}")
        return None

    async def _send(self, job: Job) -> None:
        source, transfer = await self._initialised(job)
        if job.update is None:
            return
        base, self._delivered = self._delivered, None
        source.views, self.client.times = job.update.views, (0.0, 0.0)
        paused = self._pause is not None
        try:
            if paused:
                await self.client.request("pause", f"{PAUSE}?mode={self._pause}")
            carried = job.layout.nbytes
            if isinstance(transfer, BodyTransfer):
                carried = await transfer.send(job.update, base, job.differences)
            else:
                await self._in_thread(transfer.send_weights)
            if paused:
                await self.client.request("resume", RESUME)
                paused = False
            self.costs = *self.client.times, carried
        finally:
            source.views = ()
            if paused:  # the error that is being raised is the one to report
                phase, self.client.deadline = self.client.phase, deadline_in(_RESUME_TIMEOUT)
                with suppress(EngineError):
                    await self.client.request("resume", RESUME)
                self.client.phase = phase

    async def _initialised(self, job: Job) -> tuple[VersionSource, Any]:
        """Phase 1, for a new layout."""
        if self._transfer is None or self._transfer[0] != job.layout:
            self._transfer = self._delivered = None
            source = VersionSource(job.layout)
            self.client.phase = "init"
            if self._make_transfer is None:
                transfer = BodyTransfer(self.client, job.layout, self._chunk_bytes)
                await transfer.initialise(delta=self._delta)
            else:
                transfer = await self._in_thread(self._make_transfer, self.client, source)
            self._transfer = job.layout, source, transfer
        return self._transfer[1:]

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a user's transfer. If it is given up, its requests fail; the next attempt begins when it has ended."""
        calling = asyncio.ensure_future(run_blocking("engine", function, *arguments))
        try:
            return await asyncio.shield(calling)
        finally:
            if not calling.done():
                self.client.deadline = NOW
                await asyncio.wait([calling])


class Engines(Outlet):
    """An ``Outlet`` to engines.

    Args:
        clients: one for each engine, by index.
        make_transfer: makes what carries the weights; None: HTTP bodies of at most ``chunk_bytes``.
        chunk_bytes: see there.
        pause: pause generation meanwhile; None: do not.
        timeout: returns the seconds that an update may take; None for no limit.
        delta: makes differences to the versions that engines have; None: full versions are sent.
    """

    transactional = False

    def __init__(
        self,
        clients: Sequence[EngineClient],
        make_transfer: MakeTransfer | None,
        chunk_bytes: int,
        pause: PauseMode | None,
        timeout: Callable[[], float | None],
        delta: Delta | None,
    ) -> None:
        self.name = secrets.token_hex(8)
        self._delta = delta if make_transfer is None else None
        delta_is_used = self._delta is not None
        self._engines = [Engine(one, make_transfer, chunk_bytes, pause, delta=delta_is_used) for one in clients]
        self._timeout = timeout
        self._pool = BufferPool()
        self._layout: Layout | None = None
        self._closed = False
        self._loop = control_loop().acquire()

    @property
    def workers(self) -> Sequence[int]:
        """The engines that are connected."""
        return [worker for worker, engine in enumerate(self._engines) if engine.present]

    def causes(self) -> Mapping[int, str]:
        """Why an engine that was connected is absent."""
        return {index: one.cause for index, one in enumerate(self._engines) if one.cause and not one.present}

    # --- connecting ---

    def connect(self, processes: Processes | None, deadline: float | None) -> None:
        """Wait until all engines answer, as they may be starting, and until they have the newest version, if any.

        Raises:
            SyncTimeout: names the engines that did not answer, and why.
            WorkerDied: ``disconnect`` was called for one that has not answered; or its process has ended.
            WorkerFailed: an engine has answered with an error: it refuses the token, or has no such route.
        """
        self.connect_to(range(len(self._engines)), processes, deadline)

    def readmit(self, worker: int, process: Any, deadline: float | None) -> None:
        """Do so for the engine that was started again in the place of a worker."""
        self.disconnect(worker, "it is being replaced")
        self.connect_to([worker], None if process is None else {worker: process}, deadline)

    def connect_to(self, workers: Sequence[int], processes: Processes | None, deadline: float | None) -> None:
        """Do so for some engines."""
        with watched(processes, len(self._engines)) as sentinels:
            self._loop.call(self._meet(workers, sentinels, deadline))

    async def _meet(self, workers: Sequence[int], sentinels: Mapping[int, int], deadline: float | None) -> None:
        absent = {worker: self._engines[worker] for worker in workers if not self._engines[worker].present}
        loop, tasks = asyncio.get_running_loop(), dict[asyncio.Task[str], int]()
        for worker, engine in absent.items():
            engine.connecting = task = asyncio.ensure_future(engine.probe(worker, deadline))
            tasks[task] = worker
            if worker in sentinels:
                loop.add_reader(sentinels[worker], task.cancel, "its process ended before it had answered")
        try:
            done = (await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION))[0] if tasks else ()
            late = {tasks[task]: cause for task in done if (cause := task.result())}
            if late:
                causes = "\n".join(f"worker {worker}: {cause}" for worker, cause in sorted(late.items()))
                raise SyncTimeout(f"{len(late)} engine(s) did not answer in time:\n{causes}", late)
        finally:
            for task, worker in tasks.items():
                task.cancel()
                absent[worker].connecting = None
                if worker in sentinels:
                    loop.remove_reader(sentinels[worker])
        for engine in absent.values():
            engine.present, engine.cause = True, ""
            if engine.latest is not None:
                engine.submit(replace(engine.latest, deadline=deadline))
        causes = await self._outcomes([worker for worker, engine in absent.items() if engine.latest], deadline)
        for worker, cause in causes.items():
            kind = {"died": WorkerDied, "failed": WorkerFailed, "late": SyncTimeout}[cause.kind]
            raise kind(f"worker {worker}: {cause.text}", {one: text for one, (_, text) in causes.items()})

    def disconnect(self, worker: int, cause: str) -> None:
        """Treat an engine as dead; ends a wait for it in another thread."""
        self._loop.post(self._engines[worker].disconnect, cause)

    # --- updates ---

    def set_layout(self, layout: Layout) -> None:
        """Define what is sent. LayoutMismatch: there is extra state, which is pickled."""
        if layout.extra:
            raise LayoutMismatch(f"extra state cannot be sent over HTTP: {', '.join(sorted(layout.extra))}")
        self._layout = layout

    def check_layout(self, layout: Layout, deadline: float | None) -> Mapping[int, Cause]:
        """Phase init, for engines that have connected before there was a layout."""
        return self._loop.call(self._each(self.workers, lambda engine: engine.attempt(Job(layout, deadline))))

    def reserve(self, deadline: float | None) -> Buffer:
        """Return private memory."""
        assert self._layout is not None, "set_layout() comes first"
        return self._pool.reserve(self._layout)

    def publish(self, update: Update, workers: Sequence[int]) -> None:
        """Begin to send a version; absent engines get it when they are readmitted. LayoutMismatch: extra state."""
        require_no_extra(update.extra, "sent over HTTP")
        update.checksum = update.checksum or checksum_of(update.buffer.memory, b"")
        differences = None if self._delta is None else Differences(self._delta, update)
        job = Job(update.buffer.layout, deadline_in(self._timeout()), update, differences)
        self._loop.post(self._submit, job, workers)

    def _submit(self, job: Job, workers: Sequence[int]) -> None:
        for worker in workers:
            self._engines[worker].latest = job
            self._engines[worker].submit(job)

    def wait(self, workers: Sequence[int], version: int, stage: Stage, deadline: float | None) -> Mapping[int, Cause]:
        """Wait until engines have loaded their newest version. Requests without an answer are given up then."""
        return self._loop.call(self._outcomes(workers, deadline))

    async def _outcomes(self, workers: Sequence[int], deadline: float | None) -> Mapping[int, Cause]:
        return await self._each(workers, lambda engine: engine.outcome(deadline))

    async def _each(self, workers: Sequence[int], ask: Callable[[Engine], Any]) -> Mapping[int, Cause]:
        """Ask engines side by side; return the causes that some have answered."""
        causes = await asyncio.gather(*(ask(self._engines[worker]) for worker in workers))
        return {worker: cause for worker, cause in zip(workers, causes, strict=True) if cause is not None}

    def costs(self, workers: Sequence[int], version: int) -> tuple[float, float, int]:
        """Return the slowest engine's seconds of waiting and of loading, and the most bytes that one was sent."""
        each = [self._engines[worker].costs for worker in workers] or [(0.0, 0.0, 0)]
        slowest = max(each, key=lambda one: one[0] + one[1])
        return *slowest[:2], max(one[2] for one in each)

    def close(self, *, graceful: bool) -> None:
        """End the requests; the engines keep their weights. Idempotent."""
        if self._closed or self._loop.inherited:
            return
        self._closed = True
        if self._loop.here:  # the finalizer of a scheme: it cannot wait
            self._loop.start(self._end_all())
        else:
            with suppress(TimeoutError):
                self._loop.call(self._end_all(), deadline_in(2 * _RESUME_TIMEOUT))
        self._loop.release()

    async def _end_all(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self._engines))
