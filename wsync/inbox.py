"""A worker's connection to its sender, and a sender in the same process: the inboxes of a receiver.

With the arena, updates come by a word in shared memory, and the connection has only what is not usual: layouts,
transactions, refusals, the end. Without it, they come by the connection and its medium.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from wsync.control.listen import dial
from wsync.control.loop import ControlLoop, control_loop
from wsync.control.rendezvous import Rendezvous
from wsync.control.session import Medium, SessionInbox
from wsync.control.wire import Fits, Link, Settings
from wsync.deadlines import remaining
from wsync.errors import LayoutMismatch, NotConnected, SyncTimeout
from wsync.gate import process_gate
from wsync.media.inline import InlineMedium
from wsync.native import native
from wsync.receiver import Receiver
from wsync.shm.arena import ArenaInbox
from wsync.transforms.delta import apply_difference
from wsync.update import Cause, Stage, Update
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer, BufferPool


class WorkerInbox:
    """The updates of one worker, from a sender in another process (an ``Inbox``).

    Args:
        rendezvous: how the sender is found.
        pickled: what the pickled scheme has of the sender's address.
        model_id: the model's name.
        owner: the receiver.
        make_medium: makes the connection's medium; given the worker's index.
        binds_arena: whether a model is bound to slots of the arena.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        pickled: Any,
        model_id: str,
        owner: Receiver,
        make_medium: Callable[[int], Medium],
        *,
        binds_arena: bool,
    ) -> None:
        self.binds = True
        self._rendezvous, self._pickled, self._model_id = rendezvous, pickled, model_id
        self._owner, self._make_medium = owner, make_medium
        self._binds_arena = binds_arena
        self._session: SessionInbox | None = None
        self._arena: ArenaInbox | None = None
        self._loop: ControlLoop | None = None
        self._joining: asyncio.Task[Any] | None = None
        self._running: asyncio.Task[None] | None = None
        self._pidfd = -1
        self._target: Any = None
        self._waited_for = False

    # --- the connection ---

    def connect(self, worker_idx: int, deadline: float | None) -> int:
        """Connect; return the first version that the sender has for this worker."""
        loop = self._loop = control_loop().acquire()
        for address in self._rendezvous.addresses(self._pickled, self._model_id, worker_idx, deadline):
            try:
                first = loop.call(self._join(address, worker_idx, deadline))
            except NotConnected as error:
                if self._rendezvous.passes_over(error):
                    continue
                raise
            self._rendezvous.connected(address, worker_idx)
            return first
        raise NotConnected(f"worker {worker_idx}: no sender of '{self._model_id}' was found")

    async def _join(self, address: Any, worker: int, deadline: float | None) -> int:
        self._joining = asyncio.current_task()
        link, pid, fds = await dial(address, "weights", self._model_id, worker, deadline, native=native is not None)
        try:
            async with asyncio.timeout(remaining(deadline)):
                settings = await link.receive()
                if not isinstance(settings, Settings):
                    raise ConnectionError("a sender begins with its settings")
                return await self._begin(link, settings, worker, pid, fds)
        except BaseException as error:
            link.close(ConnectionError("this worker has given up"))
            if isinstance(error, TimeoutError):
                raise SyncTimeout(f"worker {worker}: the sender did not answer in time") from None
            if isinstance(error, ConnectionError):
                raise NotConnected(f"worker {worker}: the sender has gone: {error}") from error
            raise

    async def _begin(self, link: Link, settings: Settings, worker: int, pid: int, fds: Sequence[int]) -> int:
        owner, loop = self._owner, asyncio.get_running_loop()
        owner.sender, owner.on_request = settings.sender, settings.on_request
        if settings.arena is not None:
            capacity, block = settings.arena
            self.binds = self._binds_arena
            self._arena = arena = ArenaInbox(
                fds, block, capacity, binds=self._binds_arena and owner.bind, checksum=settings.checksum
            )
            arena.on_refused = self._refuse
            self.set_wakeups(True)
            loop.add_reader(arena.wake, self._on_wake)
        post = self._loop.post if self._loop is not None else loop.call_soon_threadsafe
        slots = None if self._arena is None else self._arena.update_in
        self._session = SessionInbox(
            link,
            InlineMedium() if slots else self._make_medium(worker),
            owner,
            post,
            apply_difference=apply_difference if settings.differences else None,
            slots=slots,
        )
        if settings.layout:
            error = await owner.use_layout(settings.layout, try_only=False)
            await link.send(Fits(error[-(1 << 16) :]))
            if error:
                raise LayoutMismatch(error.strip().rpartition("\n")[2].partition(": ")[2] or error)
        else:
            await link.send(Fits())
        with suppress(OSError):
            self._pidfd = os.pidfd_open(pid) if pid else -1
        if self._pidfd >= 0:
            loop.add_reader(self._pidfd, link.close, ConnectionError("the sender's process has died"))
        self._running = asyncio.ensure_future(self._session.run())
        return settings.first

    def _on_wake(self) -> None:
        assert self._arena is not None
        self._arena.announced(time.perf_counter())
        process_gate().settle()

    def _refuse(self, update: Update, error: str) -> None:
        if self._session is not None:
            self._session.refuse(update.version, error)

    def close(self) -> None:
        """End the connection. Idempotent."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.inherited:
            loop.call(self._close())
            loop.release()

    async def _close(self) -> None:
        loop = asyncio.get_running_loop()
        if self._joining is not None and not self._joining.done():  # another thread waits for it
            self._joining.cancel()
            await asyncio.wait([self._joining])
        if self._session is not None and self._running is not None and not self._running.done():
            await self._session.leave()
            await asyncio.wait([self._running])
        if self._arena is not None:
            loop.remove_reader(self._arena.wake)
        if self._pidfd >= 0:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._running = None

    # --- Inbox ---

    @property
    def newest(self) -> int:
        """The newest version that can be fetched."""
        if self._arena is not None:
            return self._arena.newest
        return self._session.newest if self._session is not None else 0

    def hook(self, receiver: Receiver) -> Any:
        """Return the gate's hook: in the arena compiled code, which installs usual updates and calls the receiver."""
        if self._arena is None:
            return receiver
        receiver.words = self._arena.words
        return self._arena.hook_for(receiver)

    def use(self, layout: Layout, target: Any) -> None:
        """Take note of the layout, and of what installs its updates."""
        self._target = target
        if self._arena is not None:
            self._arena.set_layout(layout)
            if target.may_refuse or self._owner.on_request:
                self._arena.hold_between_forwards()

    def poll(self) -> Sequence[Update]:
        """Return the updates that are newer than what is installed."""
        if self._arena is not None:
            return self._arena.poll()
        return self._session.poll() if self._session is not None else ()

    def settled(self, update: Update, error: str) -> None:
        """An update was installed, or has failed."""
        if self._arena is None:
            if self._session is not None:
                self._session.settled(update, error)
        else:
            self._arena.settled(update, error)
            if not error:
                self._set_usual()

    def _set_usual(self) -> None:
        """Have the compiled hook install usual updates, unless threads wait for them, or request them."""
        if self._arena is not None:
            usual = not (self._waited_for or self._owner.on_request or self._owner.passes_on)
            self._arena.usual(getattr(self._target, "installer", None) if usual else None)

    def answer(self, update: Update, error: str, wait: float, apply: float) -> None:
        """Tell the sender what came of an update."""
        if self._arena is not None:
            self._arena.answer(update, error, wait, apply)
        elif self._session is not None:
            with suppress(NotConnected):  # this end was shut down meanwhile
                self._session.answer(update, error, wait, apply)

    def leave(self) -> None:
        """A forward has ended."""
        if self._arena is not None:
            self._arena.leave()

    def release(self) -> None:
        """The model has memory of its own."""
        if self._arena is not None:
            self._arena.unbind()
            if self._loop is None:
                self._arena.close()
                self._arena = None

    def fetch(self, deadline: float | None) -> None:
        """Ask the sender for its newest version; in the arena it is there already."""
        if self._arena is None and self._session is not None and self._loop is not None and self._owner.on_request:
            self._loop.call(self._session.fetch(), deadline)

    def set_wakeups(self, wanted: bool) -> None:
        """Have the sender wake this worker for updates that it does not have to acknowledge."""
        self._waited_for = wanted
        if self._arena is not None:
            self._arena.set_wakeups(wanted)
            process_gate().soon(self._set_usual)


class InProcess:
    """Both ends in one process: an outlet with one worker, and its inbox.

    Weights are packed into a private buffer, and copied from there into the model, inside the gate, by the thread that
    sends.

    Args:
        receiver: connects when the sender does.
    """

    workers = (0,)
    transactional = True
    binds = False
    newest = 0

    def __init__(self, receiver: Receiver) -> None:
        self.name = secrets.token_hex(8)
        self._receiver = receiver
        self._pool = BufferPool("cpu")
        self._layout: Layout | None = None
        self._staged: list[Update] = []
        self._prepared: Update | None = None
        self._errors: dict[int, str] = {}
        self._cost = (0.0, 0.0)
        self._connected = False

    # --- Outlet ---

    def causes(self) -> Mapping[int, str]:
        """Nothing: it cannot be absent."""
        return {}

    def connect(self, processes: Any, deadline: float | None) -> int:
        """Connect the receiver, unless that has been done; its own ``connect`` has nothing to wait for."""
        if not self._connected:
            self._connected = True
            layout, staged = self._layout, self._staged  # of the first weights, which the receiver forgets
            self._receiver.connect(0, remaining(deadline))
            if layout is not None:
                self.set_layout(layout)
            for update in staged:
                self.publish(update, self.workers)
        return 0

    def set_layout(self, layout: Layout) -> None:
        """Define what a buffer contains; LayoutMismatch: the model does not fit."""
        process_gate().call_without_forward(self._receiver.set_layout, layout)
        self._layout = layout

    def check_layout(self, layout: Layout, deadline: float | None) -> Mapping[int, Cause]:
        """Nothing to ask: ``set_layout`` raises."""
        return {}

    def reserve(self, deadline: float | None) -> Buffer:
        """Return a private buffer; RuntimeError: inside the gate, where nothing is installed."""
        if process_gate().held_here:
            raise RuntimeError("call send() outside any forward and any wsync.gate() block")
        assert self._layout is not None
        return self._pool.reserve(self._layout)

    def publish(self, update: Update, workers: Sequence[int]) -> None:
        """Install the update; waits for a forward that is running."""
        self._staged = [update]
        process_gate().call_without_forward(bool)

    def wait(self, workers: Sequence[int], version: int, stage: Stage, deadline: float | None) -> Mapping[int, Cause]:
        """Return why the version was not installed, if it was not."""
        error = self._errors.pop(version, "")
        return {0: Cause("failed", error)} if error else {}

    def costs(self, workers: Sequence[int], version: int) -> tuple[float, float, int]:
        """Return the seconds of the newest installation."""
        return *self._cost, 0

    def disconnect(self, worker: int, cause: str) -> None:
        """Do nothing: there is no connection."""

    def readmit(self, worker: int, process: Any, deadline: float | None) -> None:
        """Do nothing: there is no connection."""

    def prepare(self, update: Update, workers: Sequence[int]) -> None:
        """Check an undecided update against the model."""
        self._prepared = update
        error = process_gate().call_without_forward(self._receiver.check_now, update)
        if error:
            self._errors[update.version] = error

    def announce_commit(self, update: Update, workers: Sequence[int]) -> None:
        """Stage the update: it is installed with its siblings."""
        self._staged = [update]

    def commit(self, update: Update, workers: Sequence[int]) -> None:
        """Install it."""
        self._prepared = None
        process_gate().call_without_forward(bool)

    def abort(self, version: int, workers: Sequence[int]) -> None:
        """Drop what was prepared."""
        self._prepared = None

    def published(self) -> list[Buffer]:
        """Return nothing: no memory is shared."""
        return []

    # --- Inbox; ``connect`` of the receiver has nothing to wait for ---

    def hook(self, receiver: Receiver) -> Receiver:
        """Return the gate's hook."""
        return receiver

    def use(self, layout: Layout, target: Any) -> None:
        """Do nothing."""

    def poll(self) -> Sequence[Update]:
        """Return what is staged."""
        return self._staged

    def settled(self, update: Update, error: str) -> None:
        """Forget it."""
        self._staged = []
        if error:
            self._errors[update.version] = error

    def answer(self, update: Update, error: str, wait: float, apply: float) -> None:
        """Keep the costs."""
        self._cost = (wait, apply)

    def leave(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing: the model has memory of its own."""

    def fetch(self, deadline: float | None) -> None:
        """Do nothing: updates are installed as they are sent."""

    def set_wakeups(self, wanted: bool) -> None:
        """Do nothing."""

    def close(self, *, graceful: bool = True) -> None:
        """Release the memory."""
        self._staged, self._prepared = [], None
