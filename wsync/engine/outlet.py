"""The trainer's way to engines: HTTP servers that the user has started, as the workers of one sender.

Everything but the ``Outlet`` methods of ``Engines`` runs in the control thread; a transfer in a thread of its own.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any

from wsync.control.loop import control_loop, run_blocking
from wsync.control.session import checksum_of
from wsync.deadlines import deadline_in, earlier, remaining
from wsync.engine.client import EngineClient, EngineError, MakeTransfer, Transfer, VersionSource, as_transfer
from wsync.engine.protocol import PauseMode, pause_and_resume
from wsync.errors import LayoutMismatch, as_text
from wsync.update import Cause, Outlet, Stage, Update
from wsync.weights.layout import Buffer, BufferPool, Layout
from wsync.weights.targets import require_no_extra
from wsync.workers import raise_causes

_PROBE = 2.0  # seconds for one request to an engine that may be starting
_SHORTEST, _LONGEST = 0.02, 0.25  # seconds between two of them
_RESUME_TIMEOUT = 5.0  # seconds in which an engine is resumed after an update that has not begun, or is complete
_HEALTH_INTERVAL = 1.0  # seconds for which an engine may be silent before it is asked whether it lives
_BEGUN = ("start", "update", "finish")  # phases after which an engine may have no usable weights


class Engine:
    """One engine. Versions are sent one after the other; a newer one takes the place of one that waits.

    Attributes:
        present: whether it is connected.
        cause: why it is not, if that is known.
        latest: the newest version for its index, also while it is absent.
    """

    def __init__(
        self, client: EngineClient, make_transfer: MakeTransfer, pause: PauseMode | None, clear_cache: bool
    ) -> None:
        self.client = client
        self.present = False
        self.cause = ""
        self.latest: Update | None = None
        self._make_transfer = make_transfer
        self._around = None if pause is None else pause_and_resume(client.kind, pause, clear_cache)
        self._delivering: asyncio.Task[None] | None = None
        self._outcome: asyncio.Future[Cause | None] | None = None  # of the newest version
        # Of the version that was submitted last:
        self._submitted: asyncio.Future[Cause | None] | None = None  # its outcome
        self._vote: asyncio.Future[Cause | None] | None = None  # why it is not prepared
        self._decision: asyncio.Future[bool] | None = None  # whether it is to be used
        self._turn = asyncio.Lock()  # held by the delivery that is in progress
        self._transfer: tuple[Layout, VersionSource, Transfer] | None = None
        self._ending: asyncio.Future[Any] | None = None  # of the transfer before
        self._begun = False  # a version that is not complete

    async def probe(self, deadline: float | None) -> Cause | None:
        """Wait until the engine answers; return why it did not: it refuses, it was disconnected, or it is too late."""
        self.cause, said, pause = "", "", _SHORTEST
        while True:
            try:
                until = earlier(deadline, deadline_in(_PROBE))
                await run_blocking("engine", self.client.request, "connect", self.client.presence, deadline=until)
                said = ""
            except EngineError as error:
                said = said if said and error.kind == "late" else str(error)
                if 0 < error.status < 500:
                    self.cause = said
                    return Cause("failed", said)
            if self.cause:  # `disconnect` was called meanwhile
                return Cause("died", self.cause)
            if not said:
                return None
            if remaining(deadline) == 0.0:
                self.cause = said
                return Cause("late", said)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def submit(self, update: Update, deadline: float | None) -> None:
        """Send a version, once the one before has ended. An engine that is absent has died."""
        new = asyncio.get_running_loop().create_future
        self._submitted, self._vote, self._decision = states = new(), new(), new()
        if not update.undecided:
            self.commit(update)
        if self.present:
            self._delivering = asyncio.ensure_future(self._deliver(update, deadline, *states))
        else:
            _settle(Cause("died", self.cause), self._submitted, self._vote)

    def commit(self, update: Update) -> None:
        """Have the engine use the update that was submitted last."""
        self.latest, self._outcome = update, self._submitted
        _settle(True, self._decision)

    async def abort(self) -> None:
        """Have it not use that, unless this was decided; wait, for some seconds, until it goes on, if it has voted."""
        _settle(False, self._decision)
        with suppress(TimeoutError):
            async with asyncio.timeout(_RESUME_TIMEOUT if self._vote and self._vote.done() else 0), self._turn:
                pass

    async def _deliver(self, update: Update, deadline: float | None, outcome: Any, vote: Any, decision: Any) -> None:
        async with self._turn:
            is_old = decision.done() and update is not self.latest  # another is newer, or it is aborted
            if outcome.done() or is_old:  # done: the engine was disconnected
                return
            cause = await self.attempt(deadline, self.send(update.buffer.layout, update, vote, decision))
            if not outcome.done() and cause is not None and cause.kind == "died":
                self.disconnect(cause.text)
            _settle(cause, outcome, vote)

    async def answer(self, stage: Stage, deadline: float | None) -> Cause | None:
        """Wait until the version that was submitted last is prepared (``received``), or the newest one is loaded."""
        future = self._vote if stage == "received" else self._outcome
        if future is None:
            return None
        await asyncio.wait([future], timeout=remaining(deadline))
        if future.done():
            return future.result()
        return Cause("late", f"{self.client.url}: phase {self.client.phase}: no answer before the deadline")

    async def lives(self) -> Cause | None:
        """Return why an engine that has prepared a version cannot use it any more: it is dead."""
        try:
            await run_blocking("engine", self.client.require_alive, deadline_in(_PROBE))
        except EngineError as error:
            if error.kind == "died":
                self.disconnect(str(error))
                return Cause("died", str(error))
        return None

    def disconnect(self, cause: str) -> None:
        """Treat the engine as dead; what waits for it is told so. Its next version begins with a new transfer."""
        self.present, self.cause, self._begun = False, cause, False
        self._end_transfer()
        _settle(Cause("died", cause), self._outcome, self._submitted, self._vote)
        _settle(False, self._decision)
        self.client.give_up()

    async def close(self) -> None:
        """End what is being sent; wait until it has ended, for some seconds."""
        self.disconnect("the sender was shut down")
        await self.abort()
        if self._ending is not None:
            await asyncio.wait([self._ending], timeout=_RESUME_TIMEOUT)
        self.client.close()

    def _end_transfer(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            self._ending = asyncio.ensure_future(run_blocking("engine", transfer[2].shutdown))

    # --- one attempt ---

    async def attempt(self, deadline: float | None, requests: Awaitable[None], phase: str = "connect") -> Cause | None:
        """Make requests that belong together; return why that has failed."""
        client = self.client
        client.deadline, client.phase = deadline, phase
        try:
            await requests
            return None
        except EngineError as error:
            kind, text = error.kind, str(error)
        except Exception as error:  # noqa: BLE001  a user's transfer raises anything; the trainer raises WorkerFailed
            kind, text = "failed", f"{client.url}: phase {client.phase}:\n{as_text(error)}"
        if self._begun and kind != "died":
            text += "\nThe engine stays paused until it has a whole version: send again"
        return Cause(kind, text)

    async def verify(self, digests: Mapping[str, int], deadline: float | None) -> Cause | None:
        """Have the engine compare what it has with digests; return what differs, or why it does not answer."""
        async with self._turn:
            if self._transfer is None:
                return Cause("died", self.cause)
            _, source, transfer = self._transfer
            source.update = self.latest
            cause = await self.attempt(deadline, self._blocking(transfer.verify, digests), "verify")
            source.update = None
        if cause is not None and cause.kind == "died":
            self.disconnect(cause.text)
        return cause

    async def send(self, layout: Layout, update: Update | None, vote: Any = None, decision: Any = None) -> None:
        """Send a version; None: only init. ``vote`` is set (why it is not prepared), and ``decision`` awaited."""
        if self._transfer is None or self._transfer[0] != layout:
            self._end_transfer()
            self.client.phase = "init"
            source = VersionSource(layout)
            transfer = await self._blocking(self._make_transfer, self.client, source)
            self._transfer = layout, source, as_transfer(transfer)
        _, source, transfer = self._transfer
        if update is None:
            return
        if update.undecided and not transfer.prepares:
            raise EngineError(f"{self.client.url}: its transfer cannot prepare a version: send() each model")
        self.client.version, self.client.times = update.version, (0.0, 0.0)
        source.update = update
        try:
            await self._blocking(transfer.stage)
            async with self._paused():
                if await self._prepare(transfer, vote, decision):
                    await self._blocking(transfer.commit)
                    self._begun = False
        finally:
            source.update = None

    async def _prepare(self, transfer: Transfer, vote: asyncio.Future[Any], decision: asyncio.Future[bool]) -> bool:
        """Prepare a version; return whether it is to be committed, when that is decided. If not, it is aborted."""
        refusal = None
        try:
            await self._blocking(transfer.prepare)
            _settle(None, vote)
            if await decision:
                return True
        except EngineError as error:
            if error.kind != "failed":
                raise
            refusal = error
        self.client.deadline = deadline_in(_RESUME_TIMEOUT)  # the update's own may have passed
        with suppress(EngineError) if refusal else nullcontext():  # a refusal is what is reported
            await self._blocking(transfer.abort)
            self.client.phase = "prepare"  # nothing has begun
        if refusal is not None:
            raise refusal
        return False

    async def _blocking(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call what waits for the engine; EngineError: its ``/health``, on another connection, says that it is dead."""
        call = asyncio.ensure_future(run_blocking("engine", function, *args))
        while not (await asyncio.wait([call], timeout=_HEALTH_INTERVAL))[0]:
            try:
                await run_blocking("engine", self.client.require_alive, deadline_in(_PROBE))
            except EngineError as error:
                if error.kind != "died":  # no answer yet, or there is no such route
                    continue
                self.client.give_up()
                await asyncio.wait([asyncio.gather(call, return_exceptions=True)], timeout=_RESUME_TIMEOUT)
                said = f"{self.client.url}: phase {self.client.phase}: the engine has died: {error}"
                raise EngineError(said, "died") from error
        return call.result()

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Pause generation while the block runs, if that is wanted. After an error, no update may be half done."""
        if self._around is None:
            yield
            return
        pause, resume = self._around
        try:
            await self._blocking(self.client.post, "pause", *pause)
            yield
            if not self._begun:
                await self._blocking(self.client.post, "resume", *resume)
        except BaseException:
            phase = self.client.phase
            self._begun |= phase in _BEGUN
            if not self._begun:
                with suppress(EngineError):  # the other error is the one to report
                    until = deadline_in(_RESUME_TIMEOUT)
                    await run_blocking("engine", self.client.request, "resume", *resume, deadline=until)
            self.client.phase = phase
            raise


def _settle(value: Any, *states: asyncio.Future[Any] | None) -> None:
    for one in states:
        if one is not None and not one.done():
            one.set_result(value)


class Engines(Outlet):
    """An ``Outlet`` to engines. ``timeout`` returns the seconds that an update may take; None for no limit."""

    transactional = True

    def __init__(
        self,
        clients: Sequence[EngineClient],
        make_transfer: MakeTransfer,
        pause: PauseMode | None,
        timeout: Callable[[], float | None],
        *,
        clear_cache: bool = True,
    ) -> None:
        self.name = secrets.token_hex(8)
        self._engines = [Engine(client, make_transfer, pause, clear_cache) for client in clients]
        self._timeout = timeout
        self._pool = BufferPool()
        self._layout: Layout | None = None
        self._closed = False
        self._loop = control_loop().acquire()

    @property
    def workers(self) -> Sequence[int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return [worker for worker, engine in enumerate(self._engines) if engine.present]

    def causes(self) -> Mapping[int, str]:
        return {index: one.cause for index, one in enumerate(self._engines) if one.cause and not one.present}

    def connect(self, processes: Any, deadline: float | None) -> None:
        """Wait until all engines answer, as they may be starting, and have the newest version, if any.

        SyncTimeout, WorkerDied, WorkerFailed: names the engines that did not answer, were disconnected, or refuse.
        """
        absent = [worker for worker, engine in enumerate(self._engines) if not engine.present]
        self._loop.call(self._meet(absent, processes, deadline))

    def readmit(self, worker: int, process: Any, deadline: float | None) -> None:
        self.disconnect(worker, "it is being replaced")
        self._loop.call(self._meet([worker], process, deadline))

    async def _meet(self, workers: Sequence[int], processes: Any, deadline: float | None) -> None:
        if processes is not None:
            raise ValueError("an engine is known by its URL alone: its process cannot be given")
        causes = await self._each(workers, lambda engine: engine.probe(deadline))
        raise_causes(causes, "connect() failed")
        for engine in (self._engines[worker] for worker in workers):
            engine.present = True
            if engine.latest is not None:
                engine.submit(engine.latest, deadline)
        causes = await self._each(workers, lambda engine: engine.answer("installed", deadline))
        raise_causes(causes, "the newest version is missing")

    def disconnect(self, worker: int, cause: str) -> None:
        async def end() -> None:
            self._engines[worker].disconnect(cause)

        self._loop.call(end())

    def set_layout(self, layout: Layout) -> None:
        if layout.extra:
            raise LayoutMismatch(f"extra state cannot be sent over HTTP: {', '.join(sorted(layout.extra))}")
        self._layout = layout

    def check_layout(self, layout: Layout, deadline: float | None) -> Mapping[int, Cause]:
        causes = self._each(self.workers, lambda engine: engine.attempt(deadline, engine.send(layout, None)))
        return self._loop.call(causes)

    def verify(self, digests: Mapping[int, dict[str, int]], deadline: float | None) -> Mapping[int, Cause]:
        by_engine = {self._engines[worker]: own for worker, own in digests.items()}
        return self._loop.call(self._each([*digests], lambda engine: engine.verify(by_engine[engine], deadline)))

    def reserve(self, deadline: float | None) -> Buffer:
        assert self._layout is not None, "set_layout() comes first"
        return self._pool.reserve(self._layout)

    def publish(self, update: Update, workers: Sequence[int]) -> None:
        """Begin to send a version; absent engines get it when they are readmitted. LayoutMismatch: extra state."""
        require_no_extra(update.extra, "sent over HTTP")
        update.checksum = update.checksum or checksum_of(update.buffer.memory, b"")
        deadline = deadline_in(self._timeout())
        for worker in workers:
            self._loop.post(self._engines[worker].submit, update, deadline)

    prepare = publish  # an undecided version waits for the decision

    def commit(self, update: Update, workers: Sequence[int]) -> None:
        for worker in workers:
            self._loop.post(self._engines[worker].commit, update)

    def abort(self, version: int) -> None:
        self._loop.call(self._each(range(len(self._engines)), lambda engine: engine.abort()))

    def wait(self, workers: Sequence[int], version: int, stage: Stage, deadline: float | None) -> Mapping[int, Cause]:
        """Wait until engines have loaded their newest version; or have prepared it (``received``), and all live."""
        causes = self._loop.call(self._each(workers, lambda engine: engine.answer(stage, deadline)))
        if causes or stage != "received":
            return causes
        return self._loop.call(self._each(workers, lambda engine: engine.lives()))

    async def _each(self, workers: Sequence[int], ask: Callable[[Engine], Any]) -> Mapping[int, Cause]:
        """Ask engines side by side; return the causes that some have answered."""
        causes = await asyncio.gather(*(ask(self._engines[worker]) for worker in workers))
        return {worker: cause for worker, cause in zip(workers, causes, strict=True) if cause is not None}

    def seen(self, worker: int, version: int) -> dict[str, Any]:
        latest, where = self._engines[worker].latest, self._engines[worker].client.url
        sent = {} if latest is None else {"sent": latest.version, "sent_at": latest.at}
        return {**super().seen(worker, sent.get("sent", version)), "where": where, **sent}

    def costs(self, workers: Sequence[int], version: int) -> tuple[float, float, int]:
        times = (self._engines[worker].client.times for worker in workers)
        return *max(times, key=sum, default=(0.0, 0.0)), 0 if self._layout is None else self._layout.nbytes

    def close(self, *, graceful: bool) -> None:
        if self._closed or self._loop.inherited:
            return
        self._closed = True
        if self._loop.here:  # the finalizer of a scheme: it cannot wait
            self._loop.post(asyncio.ensure_future, self._end_all())
        else:
            with suppress(TimeoutError):
                self._loop.call(self._end_all(), deadline_in(2 * _RESUME_TIMEOUT))
        self._loop.release()

    async def _end_all(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self._engines))
