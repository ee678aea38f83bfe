"""How one model's updates reach one worker: the two ends of a connection.

    trainer   WorkerSession.offer → Offer, weights ─────────────────┐
    worker    Receiver.poll_update ← SessionInbox.poll ← _handle ←──┘
    trainer   WorkerSession.state ← State, Refused ←────────────────

A worker's answer says which version is *received*, *ready* and *installed* there (``Stage``). Versions only rise, so an
answer is about a state, and nothing is ever sent again.

Everything here runs in the control thread, with these exceptions: any thread may call ``WorkerSession.state`` and read
its attributes; the thread inside the gate calls ``choose``, and ``poll``, ``answer``, ``refuse`` and ``settled`` of a
``SessionInbox``.
Nothing here knows of sockets, processes or tensors: the simulator (``wsync.testing.simulation``) runs it under a clock
of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import xxhash

from wsync.control import wire
from wsync.control.wire import Changes, Link, Message, Offer, Refused, Side, State
from wsync.deadlines import NOW, remaining
from wsync.errors import NotConnected, as_text, error_of, last_line
from wsync.gate import process_gate
from wsync.update import Cause, Inbox, Stage, Update

if TYPE_CHECKING:
    from wsync.receiver import Receiver
    from wsync.weights.layout import Buffer

_KEPT_REFUSALS = 1000
_LAST_WORDS = 0.05  # seconds to read what the other end has said, once this end cannot write
_FAREWELL = 1.0  # seconds for this end to say that it has shut down


class Medium:
    """Carries the weights of one connection; used by the control thread. The base class: by the connection itself."""

    checks = False  # whether weights carry a checksum also on one machine
    waits_for_close = False  # on the sender: whether ``send`` is inside a user's call, which only ``close`` can end

    async def send(self, link: Link, offer: Offer, payload: Buffer | bytes) -> None:
        """Trainer: send the offer by ``link``, then whole weights or a difference.

        The memory is not reused before the worker has answered. A medium that carries the weights beside ``link`` sets
        ``Offer.medium``.

        Raises:
            ConnectionError: nothing can be sent to this worker any more.
            Exception: this update could not be sent; the worker stays connected.
        """
        await link.send(offer, payload if isinstance(payload, bytes) else payload.memory)

    async def receive(self, link: Link, offer: Offer, into: Buffer) -> None:
        """Worker: fill ``into`` with the weights of an offer with ``Offer.medium``, which was just received."""
        raise ConnectionError("the sender uses a medium that this worker does not have")

    def on_side(self, said: Side) -> None:
        """Take a message of the other end."""
        raise ConnectionError("the other end uses a medium that this one does not have")

    def close(self) -> None:
        """Make ``send`` and ``receive`` raise, at once. Idempotent."""

    async def wait_closed(self) -> None:
        """Wait until the threads that carry something have ended, after ``close``; a few seconds at most."""


async def _run_until_one_ends(*coroutines: Coroutine[Any, Any, None]) -> BaseException | None:
    """Run the tasks of one end, the reading one first, until one has ended; return what was raised.

    If another one ends, the first has a moment to read what the other end has said before.
    """
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(tasks[:1], timeout=_LAST_WORDS)
        return next((error for task in tasks if task.done() and (error := task.exception()) is not None), None)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def checksum_of(memory: memoryview | bytes, extra: bytes) -> int:
    """Return the checksum of packed weights and of their extra state; never 0."""
    digest = xxhash.xxh3_64(memory)
    digest.update(extra)
    return digest.intdigest() or 1


# --- the trainer's end ---


class WorkerSession:
    """The trainer's end of one connection: what its worker has, and what waits to be sent. ``run`` is its life.

    ``known`` returns the newest version that workers were given: answers are about no other. ``remote``: the worker is
    on another machine. ``on_request``: updates are sent only when the worker asks. ``difference`` returns what turns
    one version into another, or None if that is not smaller. ``on_change`` is called after each answer, and at the end.
    """

    def __init__(
        self,
        worker: int,
        link: Link,
        medium: Medium,
        known: Callable[[], int],
        *,
        remote: bool = False,
        on_request: bool = False,
        difference: Callable[[Update, Update], Awaitable[bytes | None]] | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.worker = worker
        self.reported = State(0)  # what the worker has said that it has
        self.sent_bytes = 0  # what the newest update took
        self.misfit: str | None = None  # why the model does not fit the last layout; "" if it does, None: not known yet
        self.verified = wire.Fits()  # the answer to the newest ``Verify``
        self._questions = 0  # how many of these were sent
        self._asked_about = 1  # layouts without an answer; the first one comes with the settings
        self.cause: str | None = None  # why the connection has ended
        self.checks = remote or medium.checks  # whether updates carry a checksum
        self._link, self._medium, self._difference, self._known = link, medium, difference, known
        self._on_request, self._on_change = on_request, on_change
        self._refusals: dict[int, str] = {}  # why, by version
        self.refused = (0, "")  # the last of these
        self._failed = 0  # the newest version that was refused and has taken the place of older ones
        self._messages: deque[Message] = deque()
        self._waiting: deque[Update] = deque()  # they have not begun to travel
        self._newest: Update | None = None  # what the worker may ask for
        self._asked = self._answered = 0  # the newest request, and the newest that was answered
        self._fetched = 0  # the newest version that was sent on request
        self._base: Update | None = None  # what the worker has received whole
        self._changes = Changes()

    # --- what is to be sent ---

    def post(self, message: Message) -> None:
        """Send a message, before the updates that wait."""
        self._messages.append(message)
        self._changes.tell()

    def offer(self, update: Update) -> None:
        """Send an update. It takes the place of those that have not begun to travel, unless it may be aborted."""
        if self.cause is not None:
            return
        if self._on_request:
            self._newest = update
            self._announce()
            return
        if not update.undecided:
            self._waiting.clear()
        self._waiting.append(update)
        self._changes.tell()

    def _announce(self) -> None:
        """Say which version is the newest; send it, if the worker has asked and was not sent it yet."""
        newest = self._newest
        if newest is None:
            return
        self.post(wire.Newest(newest.version, self._asked))
        if self._asked > self._answered and newest.version > self._fetched:
            self._fetched = newest.version
            self._waiting = deque([newest])
        self._answered = self._asked

    def decide(self, version: int, *, commit: bool) -> None:
        """Commit or abort an undecided update that was offered."""
        waiting = next((update for update in self._waiting if update.version == version), None)
        if waiting is not None and not commit:
            self._waiting.remove(waiting)
        else:
            self.post(wire.Decide(version, commit))

    # --- what the worker has ---

    def state(self, version: int, stage: Stage, has: int = 0) -> bool | Cause:
        """Return whether the worker has a version; or why it will not have it. ``has``: what the arena tells."""
        if version in self._refusals:
            return Cause("failed", self._refusals[version])
        if max(has, getattr(self.reported, stage)) >= version:
            return True
        if self._failed > version:
            return Cause("failed", self._refusals.get(self._failed, "it has refused a newer one"))
        return False if self.cause is None else Cause("died", self.cause)

    async def settled(self, version: int, stage: Stage) -> None:
        """Wait until ``state`` is no longer False."""
        await self._changes.until(lambda: self.state(version, stage))

    async def ask(self, layout: bytes) -> str | None:
        """Send a layout; return the answer, None if the connection has ended."""
        self.misfit = None
        self._asked_about += 1
        self.post(wire.NewLayout(layout))
        await self.answered()
        return self.misfit

    async def verify(self, digests: dict[str, int]) -> str | None:
        """Ask which tensors have other digests; return the answer, None if the connection has ended."""
        self._questions = number = self._questions + 1
        self.post(wire.Verify(number, digests))
        await self._changes.until(lambda: self.verified.verify == number or self.cause is not None)
        return self.verified.error if self.verified.verify == number else None

    async def answered(self) -> None:
        """Wait for the answer to the last layout, or for the end."""
        await self._changes.until(lambda: self.misfit is not None or self.cause is not None)

    def _changed(self) -> None:
        self._on_change()
        self._changes.tell()

    def _refuse(self, version: int, error: str, *, last: bool) -> None:
        if len(self._refusals) >= _KEPT_REFUSALS:
            del self._refusals[next(iter(self._refusals))]
        self._refusals[version] = as_text(error)
        self.refused = version, self._refusals[version]
        if last:
            self._failed = max(self._failed, version)
        self._base = None  # what the worker has received is not known

    # --- its life ---

    async def run(self) -> None:
        """Send and read until the connection ends."""
        try:
            error = await _run_until_one_ends(self._read(), self._write())
            if error is not None and not isinstance(error, ConnectionError):
                raise error
            self.end(f"its process or its connection has ended ({error})")
        finally:
            self.end("this session was cancelled")
            await self._medium.wait_closed()

    def end_if_stuck(self) -> None:
        """At a deadline: end the connection if only that ends a call of the medium."""
        if self._medium.waits_for_close:
            self.end("its transport had not sent the update before the deadline")

    def end(self, cause: str) -> None:
        """End the connection; the first cause counts."""
        if self.cause is None:
            self.cause = cause
            self._medium.close()
            self._link.close(ConnectionError(cause))
            self._waiting.clear()
            self._newest = self._base = None
            self._changed()
            # This object may live on for a while, in the traceback of an error; the owner of these must not.
            self._on_change, self._known = lambda: None, int

    async def finish(self) -> None:
        """Tell the worker that the sender has shut down in order, and end the connection."""
        with suppress(ConnectionError):
            await self._link.send(wire.Goodbye())
        self.end("the sender has shut down")

    async def _write(self) -> None:
        while True:  # a worker reads weights into the memory of the layout that it has answered
            await self._changes.until(lambda: self._messages or (self._waiting and not self._asked_about))
            if self._messages:
                await self._link.send(self._messages.popleft())
            else:
                await self._deliver(self._waiting.popleft())

    async def _deliver(self, update: Update) -> None:
        """Send one update, and wait until it has been received; newer ones take each other's place meanwhile."""
        base, payload = self._base, update.buffer
        difference = None if base is None or self._difference is None else await self._difference(base, update)
        if base is None or difference is None:
            size, on = payload.layout.nbytes, 0
        else:
            size, on, payload = len(difference), base.version, difference
        self.sent_bytes = size
        offer = Offer(
            update.version, size, update.checksum, update.extra, dict(update.requires), update.undecided, base=on
        )
        try:
            await self._medium.send(self._link, offer, payload)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001  a user's transport raises anything: the worker lacks this update
            text = f"send_weights has raised {type(error).__name__}: {error}"
            self._refuse(update.version, text, last=not update.undecided)
            self._changed()
            return
        await self.settled(update.version, "received")
        if update.version not in self._refusals:
            self._base = update if self._difference is not None else None

    async def _read(self) -> None:
        while True:
            match await self._link.receive():
                case State() | Refused() as answer if answer.version > self._known():
                    raise ConnectionError(f"it has answered about version {answer.version}, which it was not sent")
                case State() as state:
                    self.reported = state
                case Refused(version, error, last):
                    self._refuse(version, error, last=last)
                case wire.Fits(verify=number) as answer if 0 < number <= self._questions:
                    self.verified = answer
                case wire.Fits(error) if self._asked_about:
                    self._asked_about -= 1
                    self.misfit = None if self._asked_about else error
                case wire.Fetch(number):
                    self._asked = number
                    self._announce()
                case Side() as said:
                    self._medium.on_side(said)
                case wire.Goodbye():
                    self.end("it has shut down")
                    return
                case message:
                    raise ConnectionError(f"a worker does not say {message}")
            self._changed()


async def wait_for(
    sessions: Mapping[int, WorkerSession], version: int, stage: Stage, deadline: float | None
) -> dict[int, Cause]:
    """Wait until the workers have a version; return why, by worker, those lack it that do not have it."""
    with suppress(TimeoutError):
        async with asyncio.timeout(remaining(deadline)):
            while lacking := [one for one in sessions.values() if not one.state(version, stage)]:
                await lacking[0].settled(version, stage)  # another one may then refuse what was ready
    causes = {}
    for worker, session in sessions.items():
        if not session.state(version, stage) and deadline != NOW:
            session.end_if_stuck()
        state = session.state(version, stage)
        if state is not True:
            causes[worker] = state or (HELD if session.reported.received >= version else LATE)
    return causes


LATE = Cause("late", "did not answer before the deadline")
HELD = Cause("late", f"{LATE.text}: it has the update, and is in a forward pass or wsync.gate(), or was stopped")


# --- the worker's end ---


def choose(models: Iterable[Receiver]) -> dict[Receiver, Update]:
    """Return the newest update of each model such that all models then have what each requires of the others.

    It is the only place that knows what makes the parts of a transaction arrive together: each update names the
    versions of its siblings that it requires, and so does every later one.
    """
    models = list(models)
    waiting = {model: list(found) for model in models if (found := model.inbox.poll())}
    while True:
        then = {model.sender: (waiting[model][-1] if model in waiting else model).version for model in models}
        early = next((one for one in waiting if _lacks_any(then, waiting[one][-1].requires)), None)
        if early is None:
            return {model: updates[-1] for model, updates in waiting.items()}
        waiting[early].pop()
        if not waiting[early]:
            del waiting[early]


def _lacks_any(versions: Mapping[str, int], requires: Mapping[str, int]) -> bool:
    return any(versions.get(sender, version) < version for sender, version in requires.items())


class SessionInbox(Inbox):
    """The worker's end of one connection. ``run`` is its life, in the control thread.

    ``call_soon`` calls a function in the control thread. ``apply_difference``: ``(base, difference, into)``: fills
    ``into``; None: the sender sends whole weights. ``slots`` returns the update in a slot of the arena.
    """

    def __init__(
        self,
        link: Link,
        medium: Medium,
        owner: Receiver,
        call_soon: Callable[..., object],
        *,
        apply_difference: Callable[[Buffer, bytes, Buffer], Awaitable[None]] | None = None,
        slots: Callable[[int, int], Update] | None = None,
    ) -> None:
        self.newest = 0  # that can be fetched
        self._link, self._medium, self._owner = link, medium, owner
        self._call_soon, self._apply_difference, self._slots = call_soon, apply_difference, slots
        self._messages = asyncio.Queue[tuple[Message, Any]]()  # with what has followed each
        self._staged: deque[Update] = deque()  # the control thread appends, whoever is in the gate removes
        self._prepared: dict[int, Update] = {}
        self._base: Update | None = None
        self._received = 0  # the newest version that is staged or prepared
        self._answers = deque[Message]()  # to be sent before what has changed
        self._times = (0.0, 0.0)
        self._wake = asyncio.Event()  # there is something to report
        self._asked = self._answered = 0  # the newest request, and the newest that was answered
        self._coming = 0  # the version that was named in that answer
        self._arrived = 0  # the newest version that is here, or will not be
        self._changes = Changes()  # of these, and the end
        self._finished = self._ended = False

    # --- called inside the gate, or by any thread ---

    def poll(self) -> Sequence[Update]:
        return list(self._staged)

    def answer(self, update: Update, error: str, wait: float, apply: float) -> None:
        if error:
            self.refuse(update, error)
        else:
            self._times = (wait, apply)
            self._report_soon()

    def refuse(self, update: Update, error: str, *, last: bool = True) -> None:
        """Tell the sender why an update is not installed, after what is; ``last`` as in ``Refused``."""
        self._answers += [State(*self._state(), *self._times), Refused(update.version, as_text(error), last)]
        self._report_soon()

    def _verify(self, question: wire.Verify) -> None:
        error = last_line(error_of(self._owner.verify, question.digests))
        self._answers.append(wire.Fits(error, question.number, self._owner.used))
        self._report_soon()

    def _report_soon(self) -> None:
        with suppress(NotConnected):  # this end was shut down meanwhile
            self._call_soon(self._wake.set)

    def settled(self, update: Update, error: str) -> None:
        while self._staged and self._staged[0].version <= update.version:
            self._staged.popleft()

    # --- its life ---

    async def run(self) -> None:
        """Read, handle and answer until the connection ends."""
        cause = "this end was shut down"
        try:
            error = await _run_until_one_ends(self._handle_all(), self._take(), self._report())
            cause = str(self._link.cause or error or "the sender has shut down")
            if error is not None and not isinstance(error, ConnectionError):
                cause = f"{type(error).__name__}: {error}"
        finally:
            self._ended = True
            self._medium.close()
            self._link.close(ConnectionError(cause))
            self._prepared.clear()
            self._changes.tell()
            self._owner.ended(cause, finished=self._finished)
            await self._medium.wait_closed()

    async def say_goodbye(self) -> None:
        """Tell the sender that this worker has shut down in order, and end the connection."""
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(_FAREWELL):
                await self._link.send(wire.Goodbye())
        self._link.close(ConnectionError("this end was shut down"))

    async def request(self) -> None:
        """Ask for the newest version; return when it is staged or refused, or when the connection has ended.

        If there is none yet, it waits for the first.
        """
        self._asked = number = self._asked + 1
        with suppress(ConnectionError):  # then the end of the connection follows, and is told first
            await self._link.send(wire.Fetch(number))
        await self._changes.until(lambda: self._answered >= number or self._ended)
        coming = self._coming
        await self._changes.until(lambda: self._arrived >= coming or self._ended)

    async def _take(self) -> None:
        """Read; what is for the medium reaches it also while an update is received through it."""
        while True:
            match await self._link.receive():
                case Side() as said:
                    self._medium.on_side(said)
                case Offer(medium=False, slot=-1) as offer:
                    self._messages.put_nowait((offer, await self._read_payload(offer)))
                case message:
                    self._messages.put_nowait((message, None))
                    if isinstance(message, wire.Goodbye):  # nothing follows; the connection ends when this was handled
                        self._finished = True
                        self._medium.close()  # the sender's end is closed, too: what it had not sent never comes
                        await asyncio.get_running_loop().create_future()

    async def _handle_all(self) -> None:
        while True:
            match await self._messages.get():
                case Offer(version, slot=slot), _ if slot >= 0 and self._slots is not None:
                    await self._prepare(self._slots(version, slot))
                case Offer() as offer, payload:
                    await self._receive(offer, payload)
                case wire.Decide(version, commit), _:
                    prepared = self._prepared.pop(version, None)
                    if commit and prepared is not None and self._slots is None:
                        self._stage(prepared)
                    elif commit:
                        self._owner.settle()
                case wire.Newest(version, answered), _:
                    self.newest = max(self.newest, version)
                    if answered > self._answered:
                        self._answered, self._coming = answered, version
                        self._changes.tell()
                case wire.NewLayout(layout), _:
                    await self._link.send(wire.Fits(await self._owner.use_layout(layout)))
                    self._owner.settle()  # with the arena, an update may have been published already
                case wire.Verify() as question, _:  # not awaited: a forward may hold the gate until a message comes
                    process_gate().soon(partial(self._verify, question))
                case wire.Goodbye(), _:
                    return
                case message, _:
                    raise ConnectionError(f"a sender does not say {message}")

    async def _read_payload(self, offer: Offer) -> Buffer | bytes:
        """Read the bytes that follow an offer: a whole update into its place, or a difference."""
        buffer = self._owner.new_buffer()
        if offer.size > len(buffer.memory) or (offer.size < len(buffer.memory) and not offer.base):
            raise ConnectionError(f"an update of {offer.size} bytes, and the layout has {len(buffer.memory)}")
        if offer.base:
            difference = bytearray(offer.size)
            await self._link.read_into(memoryview(difference))
            return bytes(difference)
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
                await self._apply_difference(self._base.buffer, payload, buffer)
            if offer.checksum and checksum_of(buffer.memory, offer.extra) != offer.checksum:
                error = f"version {offer.version} arrived corrupt: its checksum differs"
        except ConnectionError:
            raise
        except Exception as raised:  # noqa: BLE001  a user's transport raises anything: the sender is told
            error = f"{type(raised).__name__}: {raised}"
        update = Update(offer.version, buffer, offer.extra, offer.checksum, offer.requires, undecided=offer.undecided)
        self._base = update if self._apply_difference is not None and not error else None
        if offer.undecided:
            update.damage = error
            await self._prepare(update)
        elif error:
            self.refuse(update, error)
            self._owner.missed(offer.version, error)
        else:
            self._stage(update)
        self._arrived = max(self._arrived, offer.version)
        self._changes.tell()

    async def _prepare(self, update: Update) -> None:
        error = update.damage or await self._owner.inside(self._owner.check, update)
        if error:
            self.refuse(update, error, last=False)
            return
        self._prepared[update.version] = update
        self._received = update.version
        self._wake.set()

    def _stage(self, update: Update) -> None:
        self._staged.append(update)
        self._received = max(self._received, update.version)
        self._owner.settle()
        self._wake.set()

    async def _report(self) -> None:
        """Tell the sender what this worker has, whenever that has changed. With an arena, its words say the rest."""
        said = (0, 0, 0)
        while True:
            while self._answers:
                await self._link.send(self._answers.popleft())
            state = self._state()
            if state != said:
                said = state
                await self._link.send(State(*state, *self._times))
            await self._wake.wait()
            self._wake.clear()

    def _state(self) -> tuple[int, int, int]:
        if self._slots is not None:
            return self._received, 0, 0
        installed = self._owner.passed_version
        ready = max(installed, self._owner.ready_version())
        return max(ready, self._received), ready, installed
