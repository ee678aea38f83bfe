"""A worker's connection to its sender, and a sender in the same process: where a receiver's updates come from.

With the arena, updates come by a word in shared memory, and the connection has only what is not usual: layouts,
transactions, refusals, the end. Without it, they come by the connection and its medium.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from wsync.control.auth import Address, Hello
from wsync.control.listen import Contact, dial
from wsync.control.loop import ControlLoop, control_loop, run_blocking
from wsync.control.processes import pidfd_of
from wsync.control.rendezvous import Rendezvous
from wsync.control.session import Medium, SessionInbox
from wsync.control.wire import Fits, Link, Settings
from wsync.deadlines import remaining
from wsync.errors import LayoutMismatch, NotConnected, SyncTimeout, as_text, error_of, last_line
from wsync.gate import process_gate
from wsync.native import native
from wsync.receiver import Receiver
from wsync.shm.arena import ArenaInbox
from wsync.transforms import apply_difference
from wsync.update import Cause, Inbox, Outlet, Stage, Update
from wsync.weights.layout import Buffer, BufferPool, Layout


class WorkerConnection(Inbox):
    """The connection of one worker to a sender in another process; what comes by it has an inbox of its own.

    ``pickled``: what the pickled scheme has of the sender's address. ``binds_arena``: whether a model is bound to slots
    of the arena.
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
        self._rendezvous, self._pickled, self._model_id = rendezvous, pickled, model_id
        self._owner, self._make_medium, self._binds_arena = owner, make_medium, binds_arena
        self._session: SessionInbox | None = None
        self._loop: ControlLoop | None = None
        self._joining: asyncio.Task[Any] | None = None
        self._running: asyncio.Task[None] | None = None
        self._opened = ExitStack()  # descriptors that are watched, and that of the sender's process

    def connect(self, worker_idx: int, deadline: float | None) -> int:
        """Connect; return the first version that the sender has for this worker."""
        loop = self._loop = control_loop().acquire()

        def join(address: Address) -> int:
            return loop.call(self._join(loop, address, worker_idx, deadline))

        return self._rendezvous.meet(self._pickled, self._model_id, worker_idx, deadline, join)

    async def _join(self, loop: ControlLoop, address: Address, worker: int, deadline: float | None) -> int:
        self._joining, self._session = asyncio.current_task(), None
        contact = await dial(address, Hello("weights", self._model_id, worker, native is not None), deadline)
        link = await contact.link()
        try:
            async with asyncio.timeout(remaining(deadline)):
                settings = await link.receive()
                if not isinstance(settings, Settings):
                    raise ConnectionError("a sender begins with its settings")
                return await self._begin(loop, link, settings, contact)
        except BaseException as error:
            link.close(ConnectionError("this worker has given up"))
            self._opened.close()
            if self._session is not None:
                self._owner.inbox.close()
            for fd in contact.fds if self._session is None else ():
                os.close(fd)
            if isinstance(error, TimeoutError):
                raise SyncTimeout(f"worker {worker}: the sender did not answer in time") from None
            if isinstance(error, ConnectionError):
                raise NotConnected(f"worker {worker}: the sender has gone: {error}") from error
            raise

    async def _begin(self, loop: ControlLoop, link: Link, settings: Settings, contact: Contact) -> int:
        owner, arena = self._owner, None
        owner.sender, owner.on_request = settings.sender, settings.on_request
        if settings.arena is not None:
            blocks, block = settings.arena
            binds = self._binds_arena and owner.bind
            arena = ArenaInbox(contact.fds, block, blocks, owner, binds=binds)
            arena.set_wakeups(True)
            self._watch(arena.wake, arena.woken)
        self._session = SessionInbox(
            link,
            self._make_medium(contact.hello.worker) if arena is None else Medium(),
            owner,
            loop.post,
            apply_difference=_apply_difference if settings.differences else None,
            slots=None if arena is None else arena.update_in,
        )
        if arena is not None:
            arena.refuse = self._session.refuse
        owner.inbox = arena or self._session
        error = await owner.use_layout(settings.layout) if settings.layout else ""
        await link.send(Fits(as_text(error)))
        if error:
            raise LayoutMismatch(last_line(error).partition(": ")[2] or error)
        if (pidfd := pidfd_of(contact.pid)) >= 0:
            self._opened.callback(os.close, pidfd)
            self._watch(pidfd, self._sender_died, pidfd, link)
        self._running = asyncio.ensure_future(self._session.run())
        return settings.first

    def _watch(self, descriptor: int, function: Callable[..., object], *args: Any) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, function, *args)
        self._opened.callback(loop.remove_reader, descriptor)

    def _sender_died(self, pidfd: int, link: Link) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)  # it stays readable
        link.close(ConnectionError("the sender's process has died"))

    def fetch(self, deadline: float | None) -> None:
        """Ask the sender for its newest version; in the arena it is there already."""
        inbox = self._owner.inbox
        if isinstance(inbox, SessionInbox) and self._loop is not None and self._owner.on_request:
            self._loop.call(inbox.request(), deadline)

    def close(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and not loop.inherited:
            self._rendezvous.close()
            loop.call(self._close())
            loop.release()

    async def _close(self) -> None:
        if self._joining is not None and not self._joining.done():  # another thread waits for it
            self._joining.cancel()
            await asyncio.wait([self._joining])
        if self._session is not None and self._running is not None and not self._running.done():
            await self._session.say_goodbye()
            await asyncio.wait([self._running])
        self._opened.close()
        self._running = None


async def _apply_difference(base: Buffer, difference: bytes, into: Buffer) -> None:
    """Fill ``into`` with what ``base`` and a difference make, beside the control thread."""
    await run_blocking("difference", lambda: apply_difference(base.memory, difference, into.memory))


class InProcess(Outlet, Inbox):
    """Both ends in one process: an outlet with one worker, its connection and its inbox.

    Weights are packed into a private buffer, and copied from there into the model, inside the gate, by the thread that
    sends.
    """

    workers = (0,)
    transactional = True
    binds = False

    def __init__(self, receiver: Receiver) -> None:
        self.name = secrets.token_hex(8)
        self._receiver = receiver
        self._pool = BufferPool("cpu")
        self._layout: Layout | None = None
        self._staged: list[Update] = []
        self._errors: dict[int, str] = {}
        self._cost = (0.0, 0.0)
        receiver.inbox = receiver.connection = self

    # --- the sender's side ---

    def connect(self, _: Any, deadline: float | None) -> int:
        """Connect the receiver, unless that has been done: its own ``connect`` comes here, too."""
        if self._receiver.phase != "open":
            self._receiver.connect(0, remaining(deadline))
        else:
            self._receiver.inbox = self
            if self._layout is not None:  # of the first weights
                self.set_layout(self._layout)
        return 0

    def set_layout(self, layout: Layout) -> None:
        """LayoutMismatch: the model does not fit."""
        process_gate().call_without_forward(self._receiver.set_layout, layout)
        self._layout = layout

    def reserve(self, deadline: float | None) -> Buffer:
        """RuntimeError: inside the gate, where nothing is installed."""
        if process_gate().held_here:
            raise RuntimeError("call send() outside any forward and any wsync.gate() block")
        assert self._layout is not None
        return self._pool.reserve(self._layout)

    def publish(self, update: Update, workers: Sequence[int]) -> None:
        """Install the update; waits for a forward that is running."""
        self._staged = [update]
        process_gate().install()

    def wait(self, workers: Sequence[int], version: int, stage: Stage, deadline: float | None) -> Mapping[int, Cause]:
        error = self._errors.pop(version, "")
        return {0: Cause("failed", error)} if error else {}

    def costs(self, workers: Sequence[int], version: int) -> tuple[float, float, int]:
        return *self._cost, 0

    def seen(self, worker: int, version: int) -> dict[str, Any]:
        used, at = self._receiver.used
        return {"where": f"pid {os.getpid()}", "installed": self._receiver.version, "used": used, "used_at": at}

    def verify(self, digests: Mapping[int, dict[str, int]], deadline: float | None) -> Mapping[int, Cause]:
        error = process_gate().call_without_forward(error_of, self._receiver.verify, digests[0])
        return {0: Cause("failed", last_line(error))} if error else {}

    def prepare(self, update: Update, workers: Sequence[int]) -> None:
        error = process_gate().call_without_forward(error_of, self._receiver.check, update)
        if error:
            self._errors[update.version] = error

    def announce_commit(self, update: Update, workers: Sequence[int]) -> None:
        self._staged = [update]

    def commit(self, update: Update, workers: Sequence[int]) -> None:
        process_gate().install()

    # --- the receiver's side ---

    def poll(self) -> Sequence[Update]:
        return self._staged

    def settled(self, update: Update, error: str) -> None:
        self._staged = []
        if error:
            self._errors[update.version] = error

    def answer(self, update: Update, error: str, wait: float, apply: float) -> None:
        self._cost = (wait, apply)

    def fetch(self, deadline: float | None) -> None:
        """Do nothing: updates are installed as they are sent."""

    def close(self, *, graceful: bool = True) -> None:
        """Of all three, the outlet, the connection and the inbox: do nothing. What is staged stays for the receiver."""
