"""How one model's updates reach one worker: the two ends of a connection.

    trainer   WorkerSession.offer → Offer, weights ────────────────┐
    worker    Receiver.poll_update ← SessionInbox.poll ← _take ←───┘
    trainer   WorkerSession.state ← Received, Ready, Installed ←────

An update is *received* when it is in the worker's memory, verified; *ready* when every forward that starts later uses
it, or a newer one; *installed* when the model has it. Versions only rise: what is ready or installed makes every older
one so. So answers are about a state, and nothing is ever sent again.

Everything here runs in the control thread, but for ``SessionInbox.poll``, ``answer`` and ``fetch``. Nothing here knows
of sockets, processes or tensors: the simulator (``wsync.testing.simulation``) runs it under a clock of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import xxhash

from wsync.control.wire import (
    MAX_TEXT,
    CheckLayout,
    Decide,
    Fetch,
    Finished,
    Fits,
    Installed,
    Leaving,
    Link,
    Message,
    Newest,
    NewLayout,
    Offer,
    OfferSlot,
    Ready,
    Received,
    Refused,
    Sent,
    Side,
)
from wsync.deadlines import remaining
from wsync.update import Cause, Stage, Update

if TYPE_CHECKING:
    from wsync.weights.packing import Buffer

_KEPT_REFUSALS = 1000
_FAREWELL = 1.0  # seconds for a worker to say that it has shut down
_CLOSING = 4.0  # seconds for a medium to end what it does, once its connection has ended


class Medium(Protocol):
    """Carries the weights of one connection. Used by the control thread."""

    async def send(self, link: Link, offer: Offer, payload: Buffer | bytes) -> None:
        """Trainer: send the offer by ``link``, then whole weights or a difference by the medium.

        Returns when the memory may be reused. A medium that carries the weights beside ``link`` sets ``Offer.medium``,
        and tells the worker by ``Sent`` when it has returned, or why it has failed.

        Raises:
            ConnectionError: nothing can be sent to this worker any more.
            Exception: this update could not be sent; the worker stays connected.
        """

    async def receive(self, link: Link, offer: Offer, into: Buffer) -> None:
        """Worker: fill ``into`` with the weights of an offer with ``Offer.medium``, which was just received."""

    def on_side(self, data: bytes) -> None:
        """Take a ``Side`` message of the other end."""

    def on_sent(self, version: int, error: str) -> None:
        """Worker: the trainer's ``send`` has returned, or has failed."""

    @property
    def waits_for_close(self) -> bool:
        """Whether ``send`` is in code that only ``close`` ends."""
        ...

    def close(self) -> None:
        """Make ``send`` and ``receive`` raise, at once. Idempotent."""

    async def wait_closed(self) -> None:
        """Wait until the threads that carry something have ended, after ``close``."""


async def _closed(medium: Medium | None) -> None:
    """Wait until a medium has ended what it does."""
    if medium is not None:
        medium.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSING):
                await medium.wait_closed()


def checksum_of(memory: memoryview | bytes, extra: bytes) -> int:
    """Return the checksum of packed weights and of their extra state; never 0."""
    digest = xxhash.xxh3_64(memory)
    digest.update(extra)
    return digest.intdigest() or 1


# --- the trainer's end ---


class WorkerSession:
    """The trainer's end of one connection: what its worker has, and what waits to be sent. ``run`` is its life.

    Args:
        worker: the worker's index.
        link: the connection.
        medium: carries weights; None if the worker takes them from the arena.
        on_request: whether updates are sent only when the worker asks.
        difference: returns what turns one buffer into another, or None if that is not smaller; None: whole weights
            are sent.
        on_change: called after each answer, and at the end.

    Attributes:
        received, ready, installed: the newest version of which the worker has said so.
        wait, apply: seconds that the newest installation took.
        sent_bytes: what the newest update took.
        refusals: why a version was refused, by version.
        failed: the newest version that could not be installed: an older one will not be, either.
        fits: the answer to the last layout; None while there is none.
        cause: why the connection has ended; None while it has not.
    """

    def __init__(
        self,
        worker: int,
        link: Link,
        medium: Medium | None,
        *,
        on_request: bool = False,
        difference: Callable[[Buffer, Buffer], bytes | None] | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.worker = worker
        self.received = self.ready = self.installed = 0
        self.wait = self.apply = 0.0
        self.sent_bytes = 0
        self.refusals: dict[int, str] = {}
        self.failed = 0
        self.fits: str | None = None
        self.cause: str | None = None
        self._link, self._medium, self._difference = link, medium, difference
        self._on_request, self._on_change = on_request, on_change
        self._messages: deque[Message] = deque()
        self._waiting: deque[Update] = deque()  # they have not begun to travel
        self._newest: Update | None = None  # what the worker may ask for
        self._unanswered = 0  # requests that came before there was a version
        self._fetched = 0  # the newest version for which it has asked
        self._base: Update | None = None  # what the worker has received whole
        self._wake = asyncio.Event()
        self._changes: set[asyncio.Event] = set()

    # --- what is to be sent ---

    def post(self, message: Message) -> None:
        """Send a message, before the updates that wait."""
        self._messages.append(message)
        self._wake.set()

    def offer(self, update: Update) -> None:
        """Send an update. It takes the place of those that have not begun to travel, unless it may be aborted."""
        if self.cause is not None:
            return
        if self._on_request and not update.undecided:
            self._newest = update
            self.post(Newest(update.version))
            unanswered, self._unanswered = self._unanswered, 0
            for _ in range(unanswered):
                self._fetch()
            return
        if not update.undecided:
            self._waiting.clear()
        self._waiting.append(update)
        self._wake.set()

    def decide(self, version: int, *, commit: bool) -> None:
        """Commit or abort an undecided update that was offered."""
        waiting = [update for update in self._waiting if update.version == version]
        if waiting and not commit:
            self._waiting.remove(waiting[0])
        else:
            self.post(Decide(version, commit))

    # --- what the worker has ---

    def state(self, version: int, stage: Stage) -> bool | Cause:
        """Return whether the worker has a version; or why it will not have it."""
        if version in self.refusals:
            return Cause("failed", self.refusals[version])
        if getattr(self, stage) >= version:
            return True
        if self.failed > version:
            return Cause("failed", self.refusals.get(self.failed, "it has refused a newer one"))
        return False if self.cause is None else Cause("died", self.cause)

    def watch(self, event: asyncio.Event) -> None:
        """Set ``event`` at each change, until ``unwatch``."""
        self._changes.add(event)

    def unwatch(self, event: asyncio.Event) -> None:
        """Undo ``watch``."""
        self._changes.discard(event)

    def _changed(self) -> None:
        self._on_change()
        for event in self._changes:
            event.set()

    def _refuse(self, version: int, error: str) -> None:
        if len(self.refusals) >= _KEPT_REFUSALS:
            del self.refusals[next(iter(self.refusals))]
        self.refusals[version] = error[:MAX_TEXT]
        if self._base is not None and self._base.version == version:
            self._base = None

    # --- its life ---

    async def run(self) -> None:
        """Send and read until the connection ends."""
        reading, writing = asyncio.ensure_future(self._read()), asyncio.ensure_future(self._write())
        try:
            done, _ = await asyncio.wait([reading, writing], return_when=asyncio.FIRST_COMPLETED)
            error = next((task.exception() for task in done), None)
            if error is not None and not isinstance(error, ConnectionError):
                raise error
            self.end(f"its process has ended, or its connection: {error}")
        finally:
            self.end("this session was cancelled")
            for task in (reading, writing):
                task.cancel()
            await asyncio.wait([reading, writing])
            await _closed(self._medium)

    def end_if_stuck(self) -> bool:
        """At a deadline: end the connection if only that ends a call of the medium; return whether it is so."""
        stuck = self._medium is not None and self._medium.waits_for_close
        if stuck:
            self.end("its transport had not sent the update before the deadline")
        return stuck

    def end(self, cause: str) -> None:
        """End the connection; the first cause counts."""
        if self.cause is None:
            self.cause = cause
            if self._medium is not None:
                self._medium.close()
            self._link.close(ConnectionError(cause))
            self._waiting.clear()
            self._newest = self._base = None
            self._changed()
            self._on_change = lambda: None  # this object may live on for a while, in the traceback of an error

    async def finish(self) -> None:
        """Tell the worker that the sender has shut down in order, and end the connection."""
        with suppress(ConnectionError):
            await self._link.send(Finished())
        self.end("the sender has shut down")

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._messages:
                await self._link.send(self._messages.popleft())
            if self._waiting:
                await self._deliver(self._waiting.popleft())
                self._wake.set()

    async def _deliver(self, update: Update) -> None:
        """Send one update, and wait until it has been received; newer ones take each other's place meanwhile."""
        assert self._medium is not None, "an update for the arena is not offered"
        base, encode = self._base, self._difference
        difference = None if base is None or encode is None else encode(base.buffer, update.buffer)
        payload = update.buffer if difference is None else difference
        self.sent_bytes = update.buffer.layout.nbytes if difference is None else len(difference)
        offer = Offer(
            update.version,
            self.sent_bytes,
            update.checksum,
            update.extra,
            dict(update.requires),
            update.undecided,
            0 if difference is None or base is None else base.version,
        )
        try:
            await self._medium.send(self._link, offer, payload)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001  a user's transport raises anything: the worker lacks this update
            self._refuse(update.version, f"send_weights has raised {type(error).__name__}: {error}")
            self._changed()
            return
        changed = asyncio.Event()
        self.watch(changed)
        try:
            while self.state(update.version, "received") is False:
                changed.clear()
                await changed.wait()
        finally:
            self.unwatch(changed)
        if update.version not in self.refusals:
            self._base = update if self._difference is not None else None

    async def _read(self) -> None:
        while True:
            match await self._link.receive():
                case Received(version, error) if error:
                    self._refuse(version, error)
                case Received(version):
                    self.received = max(self.received, version)
                case Ready(version):
                    self.received, self.ready = max(self.received, version), max(self.ready, version)
                case Installed(version, wait, apply):
                    self.received, self.ready = max(self.received, version), max(self.ready, version)
                    self.installed = max(self.installed, version)
                    self.wait, self.apply = max(0.0, wait), max(0.0, apply)
                case Refused(version, error):
                    self.received, self.failed = max(self.received, version), max(self.failed, version)
                    self._refuse(version, error)
                case Fits(error):
                    self.fits = error
                case Fetch():
                    self._fetch()
                case Side(data) if self._medium is not None:
                    self._medium.on_side(data)
                case Leaving():
                    self.end("it has shut down")
                    return
                case message:
                    raise ConnectionError(f"a worker does not say {message}")
            self._changed()

    def _fetch(self) -> None:
        """Say which version is the newest, as soon as there is one, and send it, unless the worker has been sent it."""
        newest = self._newest
        if newest is None:
            self._unanswered += 1
            return
        self.post(Newest(newest.version, asked=True))
        if newest.version > self._fetched:
            self._fetched = newest.version
            self._waiting.clear()
            self._waiting.append(newest)


async def wait_for(
    sessions: Mapping[int, WorkerSession], version: int, stage: Stage, deadline: float | None
) -> dict[int, Cause]:
    """Wait until the workers have a version; return why, by worker, those lack it that do not have it."""
    changed, pending, causes = asyncio.Event(), dict(sessions), dict[int, Cause]()
    for session in sessions.values():
        session.watch(changed)
    try:
        async with asyncio.timeout(remaining(deadline)):
            while True:
                changed.clear()
                for worker, session in list(pending.items()):
                    state = session.state(version, stage)
                    if state is not False:
                        del pending[worker]
                        if isinstance(state, Cause):
                            causes[worker] = state
                if not pending:
                    return causes
                await changed.wait()
    except TimeoutError:
        look_only = deadline == 0.0
        late = {w: one for w, one in pending.items() if look_only or not one.end_if_stuck()}
        died = {w: Cause("died", one.cause or "") for w, one in pending.items() if w not in late}
        return causes | died | dict.fromkeys(late, LATE)
    finally:
        for session in sessions.values():
            session.unwatch(changed)


LATE = Cause("late", "did not answer before the deadline")


# --- the worker's end ---


class Candidate(Protocol):
    """One model of a process, as the rule for updates that belong together sees it."""

    @property
    def sender(self) -> str:
        """The name of the sender of its updates."""
        ...

    @property
    def version(self) -> int:
        """What is installed."""
        ...

    def candidates(self) -> Sequence[Update]:
        """Return the updates that may be installed, and are newer than what is installed; the oldest first."""
        ...


C = TypeVar("C", bound=Candidate)


def choose(models: Iterable[C]) -> dict[C, Update]:
    """Return the newest update of each model such that all models then have what each requires of the others.

    It is the only place that knows what makes the parts of a transaction arrive together: each update names the
    versions of its siblings that it requires, and so does every later one.
    """
    models = list(models)
    waiting = {model: list(found) for model in models if (found := model.candidates())}
    while True:
        then = {m.sender: (waiting[m][-1].version if m in waiting else m.version) for m in models}
        for model, updates in waiting.items():
            requires = updates[-1].requires
            late = next((s for s, v in requires.items() if s in then and then[s] < v and s != model.sender), None)
            if late is not None:
                updates.pop()
                if not updates:
                    del waiting[model]
                break
        else:
            return {model: updates[-1] for model, updates in waiting.items()}


class Owner(Protocol):
    """The receiver of a model, as its connection calls it. All methods are called in the control thread."""

    @property
    def version(self) -> int:
        """What is installed."""
        ...

    @property
    def passed_version(self) -> int:
        """What is installed, and passed on where this worker has workers of its own."""
        ...

    async def use_layout(self, layout: bytes, *, try_only: bool) -> str:
        """Use weights of this layout from now on, or only try it; return why they do not fit, or an empty string."""
        ...

    def new_buffer(self) -> Buffer:
        """Return room for one update."""
        ...

    async def check(self, update: Update) -> str:
        """Find out, inside the gate, whether the model would take an update; return why not, or an empty string."""
        ...

    def settle(self) -> None:
        """Install what can be installed, if nobody holds the gate; who holds it does it on leaving."""

    def ready_version(self) -> int:
        """Return the version that a forward that starts now would use."""
        ...

    def missed(self, version: int, error: str) -> None:
        """A version has not arrived, and will not: why."""

    def ended(self, cause: str, *, finished: bool) -> None:
        """The connection has ended; ``finished``: the sender has shut down in order."""


class SessionInbox:
    """The worker's end of one connection. ``run`` is its life, in the control thread.

    Args:
        link: the connection.
        medium: carries weights.
        owner: the receiver.
        call_soon: calls a function in the control thread; called by any thread.
        apply_difference: ``(base, difference, into)``: fills ``into``; None: the sender sends whole weights.
        slots: returns the update in a slot of the arena; None without an arena.
    """

    def __init__(
        self,
        link: Link,
        medium: Medium,
        owner: Owner,
        call_soon: Callable[..., object],
        *,
        apply_difference: Callable[[memoryview, bytes, memoryview], None] | None = None,
        slots: Callable[[int, int], Update] | None = None,
    ) -> None:
        self.newest = 0  # that can be fetched
        self._link, self._medium, self._owner = link, medium, owner
        self._call_soon, self._apply_difference, self._slots = call_soon, apply_difference, slots
        self._staged: deque[Update] = deque()  # the control thread appends, whoever is in the gate removes
        self._prepared: dict[int, Update] = {}
        self._base: Update | None = None
        self._said = (0, 0, 0)  # what the sender was told: received, ready, installed
        self._refusals: deque[Refused] = deque()
        self._times = (0.0, 0.0)
        self._wake = asyncio.Event()
        self._fetching: deque[asyncio.Future[int]] = deque()  # each gets the version that is the newest one
        self._arrived, self._arrival = 0, asyncio.Event()  # the newest version that is here, or will not be
        self._ended = False
        self._busy: asyncio.Task[None] | None = None  # receives an update through the medium
        self._later = deque[tuple[Any, Any]]()  # messages that have come meanwhile

    # --- Inbox; called inside the gate ---

    def poll(self) -> Sequence[Update]:
        """Return what is staged, the oldest first."""
        return list(self._staged)

    def answer(self, update: Update, error: str, wait: float, apply: float) -> None:
        """Tell the sender what came of an update; called by any thread."""
        if error:
            self.refuse(update.version, error)
        else:
            self._times = (wait, apply)
            self._call_soon(self._wake.set)

    def refuse(self, version: int, error: str) -> None:
        """Tell the sender why a version was not installed; called by any thread."""
        self._refusals.append(Refused(version, error[-MAX_TEXT:]))
        self._call_soon(self._wake.set)

    def settled(self, update: Update, error: str) -> None:
        """Forget what is staged up to an update that was installed; or that one, if it has failed."""
        if error:
            with suppress(ValueError):
                self._staged.remove(update)
        while not error and self._staged and self._staged[0].version <= update.version:
            self._staged.popleft()

    # --- its life ---

    async def run(self) -> None:
        """Read and answer until the connection ends."""
        reading, telling = asyncio.ensure_future(self._take()), asyncio.ensure_future(self._report())
        finished, cause = False, "this end was shut down"
        try:
            done, _ = await asyncio.wait([reading, telling], return_when=asyncio.FIRST_COMPLETED)
            error = next((task.exception() for task in done), None)
            finished, cause = error is None, str(self._link.cause or error or "the sender has shut down")
            if error is not None and not isinstance(error, ConnectionError):
                cause = f"{type(error).__name__}: {error}"
        finally:
            self._ended = True
            tasks = [task for task in (reading, telling, self._busy) if task is not None]
            for task in tasks:
                task.cancel()
            self._medium.close()
            self._link.close(ConnectionError(cause))
            self._prepared.clear()
            self._answer_fetch(*[0] * len(self._fetching))
            self._arrival.set()
            self._owner.ended(cause, finished=finished)
            await asyncio.wait(tasks)
            await _closed(self._medium)

    async def leave(self) -> None:
        """Tell the sender that this worker has shut down in order, and end the connection."""
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(_FAREWELL):
                await self._link.send(Leaving())
        self._link.close(ConnectionError("this end was shut down"))

    async def fetch(self) -> None:
        """Ask for the newest version; return when it, or the first, is staged or refused, or the connection ended."""
        answer = asyncio.get_running_loop().create_future()
        with suppress(ConnectionError):
            self._fetching.append(answer)
            await self._link.send(Fetch())
            newest = await answer
            while self._arrived < newest and not self._ended:
                self._arrival.clear()
                await self._arrival.wait()

    def _answer_fetch(self, *versions: int) -> None:
        for version in versions:
            answer = self._fetching.popleft()
            answer.done() or answer.set_result(version)

    def _note_arrival(self, version: int) -> None:
        self._arrived = max(self._arrived, version)
        self._arrival.set()

    async def _take(self) -> None:
        while True:
            message = await self._link.receive()
            if isinstance(message, Side):
                self._medium.on_side(message.data)
            elif isinstance(message, Sent):
                self._medium.on_sent(message.version, message.error)
            elif isinstance(message, Finished):
                return
            else:
                payload = None
                if isinstance(message, Offer) and not message.medium:
                    payload = await self._read_payload(message)
                if self._busy is not None:
                    self._later.append((message, payload))
                elif isinstance(message, Offer) and message.medium:  # `Side` messages are read meanwhile
                    self._busy = asyncio.ensure_future(self._handle_all(message))
                else:
                    await self._handle(message, payload)

    async def _handle_all(self, message: Any) -> None:
        """Handle a message, and those that come meanwhile, in order."""
        try:
            await self._handle(message, None)
            while self._later:
                await self._handle(*self._later.popleft())
        except Exception as error:  # noqa: BLE001  it ends the connection
            self._link.close(error if isinstance(error, ConnectionError) else ConnectionError(repr(error)))
        finally:
            self._busy = None

    async def _handle(self, message: Any, payload: Buffer | bytes | None) -> None:
        match message:
            case Offer():
                await self._receive(message, payload)
            case OfferSlot(version, slot) if self._slots is not None:
                await self._prepare(self._slots(version, slot))
            case Decide(version, commit):
                prepared = self._prepared.pop(version, None)
                if commit and prepared is not None and self._slots is None:
                    self._stage(prepared)
                elif commit:
                    self._owner.settle()
            case Newest(version, asked):
                self.newest = max(self.newest, version)
                if asked and self._fetching:
                    self._answer_fetch(version)
            case CheckLayout(layout):
                error = await self._owner.use_layout(layout, try_only=True)
                await self._link.send(Fits(error[-MAX_TEXT:]))
            case NewLayout(layout):
                await self._owner.use_layout(layout, try_only=False)
                self._owner.settle()  # with the arena, an update may have been published already
            case _:
                raise ConnectionError(f"a sender does not say {message}")

    async def _read_payload(self, offer: Offer) -> Buffer | bytes:
        """Read the bytes that follow an offer: a whole update into its place, or a difference."""
        if offer.base:
            difference = bytearray(offer.size)
            await self._link.read_into(memoryview(difference))
            return bytes(difference)
        buffer = self._owner.new_buffer()
        if offer.size != len(buffer.memory):
            raise ConnectionError(f"an update of {offer.size} bytes, and the layout has {len(buffer.memory)}")
        await self._link.read_into(buffer.memory)
        return buffer

    async def _receive(self, offer: Offer, payload: Buffer | bytes | None) -> None:
        error, buffer = "", self._owner.new_buffer() if payload is None or isinstance(payload, bytes) else payload
        try:
            if payload is None:
                await self._medium.receive(self._link, offer, buffer)
            elif isinstance(payload, bytes):
                if self._apply_difference is None or self._base is None or self._base.version != offer.base:
                    raise ValueError(f"a difference to version {offer.base}, which is not here")
                self._apply_difference(self._base.buffer.memory, payload, buffer.memory)
            if offer.checksum and checksum_of(buffer.memory, offer.extra) != offer.checksum:
                error = f"version {offer.version} arrived corrupt: its checksum differs"
        except ConnectionError:
            raise
        except Exception as raised:  # noqa: BLE001  a user's transport raises anything: the sender is told
            error = f"{type(raised).__name__}: {raised}"
        if error:
            self._base = None
            await self._link.send(Received(offer.version, error[-MAX_TEXT:]))
            if not offer.undecided:
                self._owner.missed(offer.version, error)
            self._note_arrival(offer.version)
            return
        update = Update(offer.version, buffer, offer.extra, offer.checksum, offer.requires, undecided=offer.undecided)
        self._base = update if self._apply_difference is not None else None
        if offer.undecided:
            await self._prepare(update)
        else:
            self._stage(update)

    async def _prepare(self, update: Update) -> None:
        error = update.damage or await self._owner.check(update)
        if not error:
            self._prepared[update.version] = update
        await self._link.send(Received(update.version, error[-MAX_TEXT:]))

    def _stage(self, update: Update) -> None:
        self._staged.append(update)
        self._owner.settle()
        self._wake.set()
        self._note_arrival(update.version)

    async def _report(self) -> None:
        """Say what has become ready and installed, once for each version. With an arena, its words say so."""
        while True:
            while self._refusals:
                await self._link.send(self._refusals.popleft())
            if self._slots is None:
                await self._say_version()
            await self._wake.wait()
            self._wake.clear()

    async def _say_version(self) -> None:
        installed = self._owner.passed_version
        ready = max(installed, self._owner.ready_version())
        received = max(ready, self._staged[-1].version if self._staged else 0)
        said, self._said = self._said, (received, ready, installed)
        if installed > said[2]:
            await self._link.send(Installed(installed, *self._times))
        elif ready > said[1]:
            await self._link.send(Ready(ready))
        if received > max(said[0], ready):
            await self._link.send(Received(received))
