"""The outlet to worker processes: a connection to each and, for those on this machine, the arena.

    usual update   arena.publish: one word per worker → worker → arena.wait: one word back      no thread, no message
    other workers  WorkerSession.offer, in the control thread → their answers

Two threads use an outlet: the one that calls the scheme, under the sender's lock, and the control thread, which accepts
workers and notices their ends. ``_lock`` guards what both change: the members, the newest update of each index, to whom
each version was given, and the arena's headers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from wsync.control.listen import Contact, Listener
from wsync.control.loop import ControlLoop, control_loop, run_blocking
from wsync.control.processes import Processes, may_run, pidfd_of, require_descriptors, watched
from wsync.control.session import HELD, LATE, Medium, WorkerSession, checksum_of, wait_for
from wsync.control.wire import Offer, Settings
from wsync.deadlines import remaining
from wsync.errors import NotConnected, SyncTimeout, WorkerDied, WorkerFailed, join_indices, last_line
from wsync.gate import process_gate
from wsync.native import native, why_not
from wsync.shm.arena import SenderArena
from wsync.transforms import Delta
from wsync.update import Cause, Outlet, Stage, Update
from wsync.weights.layout import Buffer, BufferPool, Layout

_log = logging.getLogger(__name__)
_SPARE_BLOCKS = 32  # of the arena: for connections whose processes were replaced, and have not ended yet
_BY_ARENA, _BY_SOCKET = 4, 7  # the most descriptors for a worker: by a socket, with a process group
_FAREWELL = 5.0  # seconds in which workers are told that the sender has shut down


class Member:
    """A worker that is connected."""

    session: WorkerSession  # its connection; set once it is accepted

    def __init__(self, pid: int, where: str) -> None:
        self.pid, self.pidfd = pid, pidfd_of(pid)  # its process; 0 and -1 if that is on another machine
        self.where = where  # for people
        self.block = -1  # its words in the arena, if it uses that
        self.fresh = True  # it has connected since the last `connect` or `readmit`, which takes it for a replacement
        self.has_layout = False  # it was sent the layout


class Workers(Outlet):
    """The workers of one sender, which connect to ``listener``.

    With ``arena``, workers on this machine use it; ``make_medium`` makes the medium of another one, given its index,
    and ``delta`` the differences that it is sent. ``on_request``: workers fetch updates. Weights are packed on
    ``device``. ``loop`` is for the simulator.
    """

    moves_bytes = False

    def __init__(
        self,
        listener: Listener,
        num_workers: int,
        make_medium: Callable[[int], Medium],
        *,
        arena: bool,
        on_request: bool,
        delta: Delta | None = None,
        device: torch.device | str = "cpu",
        loop: ControlLoop | None = None,
    ) -> None:
        self.name, self.transactional = secrets.token_hex(8), not on_request
        self._listener, self._num_workers = listener, num_workers
        self._make_medium, self._on_request = make_medium, on_request
        in_main_memory = torch.device(device).type == "cpu"
        self._difference = partial(_difference, delta, {}) if delta is not None and in_main_memory else None
        self._arena = SenderArena(2 * num_workers + _SPARE_BLOCKS) if arena and native is not None else None
        self._serial, self._serial_of = 0, dict[str, int]()  # the number of what updates require: see `store_header`
        if arena and native is None:
            _log.warning("wsync: weights go through sockets, more slowly than through shared memory: %s", why_not)
        self._pool = BufferPool(device)
        self._layout: Layout | None = None
        self._lock = threading.Lock()
        self.workers: Sequence[int] = ()  # those that are present; replaced whenever that changes
        self._all_blocks: tuple[int, ...] = ()  # those of all workers, if all are present and use the arena
        self._members: Mapping[int, Member] = {}  # replaced, never changed
        self._has_worker_here = False  # in the trainer's own process
        self._causes: Mapping[int, str] = {}
        self._where = dict[int, str]()  # where each worker is, or was
        self._newest: list[Update | None] = [None] * num_workers
        self._version = 0  # the newest that any worker was given
        self._given: dict[int, Mapping[int, Member]] = {}  # by version: to whom it was given
        self._rejected: dict[int, str] = {}  # workers whose models do not fit, since `connect` was called
        self._refused = ""  # why a process was not accepted, since then
        self._news = asyncio.Event()  # a worker has connected, was rejected, or has ended
        self._leftovers: set[Member] = set()  # disconnected ones whose processes live on
        self._tasks: set[Any] = set()  # one for each worker
        self._closed = False
        self._loop = (loop or control_loop()).acquire()

    # --- the control thread: a worker's life ---

    async def _welcome(self, contact: Contact) -> None:
        """Accept a worker, and run its session until it ends."""
        worker = contact.hello.worker
        if not 0 <= worker < self._num_workers:
            last = self._num_workers - 1
            return await self._refuse(contact, f"index {worker} is out of range: there are workers 0 to {last}")
        if worker in self._members:
            return await self._refuse(contact, f"index {worker} is taken by a worker that is connected")
        task, member = asyncio.current_task(), Member(contact.pid, contact.where)
        self._tasks.add(task)
        try:
            if self._arena is not None and contact.hello.native and member.pidfd >= 0:
                wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                try:  # the worker is sent it, and the arena has a duplicate
                    member.block = self._arena.open_block(wake, member.pidfd, worker)
                    await contact.accept((*self._arena.fds, self._arena.signal, wake))
                except IndexError:
                    return await self._refuse(contact, "too many processes that were connected before still live")
                finally:
                    os.close(wake)
            else:
                await contact.accept()
            link = await contact.link()
            member.session = WorkerSession(
                worker,
                link,
                Medium() if member.block >= 0 or contact.hello.inline else self._make_medium(worker),
                lambda: self._version,
                remote=member.pidfd < 0,
                on_request=self._on_request,
                difference=self._difference,
                on_change=partial(self._note_change, member),
            )
            await self._attend(member)
        finally:
            self._release_when_dead(member)
            self._tasks.discard(task)
            del task  # else it and this frame keep each other, and with them the memory of the arena

    async def _refuse(self, contact: Contact, why: str) -> None:
        self._refused = f"; a process was refused: {why}"
        await contact.refuse(why)

    def _note_change(self, member: Member) -> None:
        """A session has an answer, or has ended. Called before any waiting thread is woken."""
        worker, cause = member.session.worker, member.session.cause
        if member.has_layout and member.session.misfit:
            member.session.end("its model does not fit the weights")
        if cause is not None:
            if self._members.get(worker) is member:
                with self._lock:
                    self._set_members({w: one for w, one in self._members.items() if one is not member})
                    self._causes = {**self._causes, worker: cause}
            self._news.set()
        if member.block >= 0 and self._arena is not None:
            self._arena.attention(member.block)

    async def _attend(self, member: Member) -> None:
        session, loop = member.session, asyncio.get_running_loop()
        newest, layout = self._newest[session.worker], self._layout
        encoded = b"" if layout is None else layout.encode()
        first = 0 if newest is None else newest.version
        arena = None if self._arena is None or member.block < 0 else (self._arena.blocks, member.block)
        member.has_layout = layout is not None
        session.post(Settings(self.name, encoded, self._on_request, first, arena, self._difference is not None))
        if member.pidfd >= 0:
            loop.add_reader(member.pidfd, session.end, "its process has ended")
        running = asyncio.ensure_future(session.run())
        try:
            await session.answered()
            if not session.misfit and session.cause is None and layout is not self._layout:  # it was defined meanwhile
                await self._send_layout(member)
            if session.misfit:
                self._rejected[session.worker] = session.misfit
                self._news.set()
            elif session.cause is None:
                self._add(member)
            await running
        finally:
            session.end("the sender has shut down")
            running.cancel()
            if member.pidfd >= 0:
                loop.remove_reader(member.pidfd)
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])

    def _add(self, member: Member) -> None:
        """From now on the worker is given updates; now the newest one of its index."""
        worker = member.session.worker
        if worker in self._members:
            return member.session.end(f"another connection has taken index {worker}")
        with self._lock:
            newest = self._newest[worker]
            if newest is not None:
                self._give(newest, {worker: member}, not self._on_request)
                if (given := self._given.get(newest.version)) is not None:
                    self._given[newest.version] = {**given, worker: member}
            self._set_members({**self._members, worker: member})
            self._causes = {w: cause for w, cause in self._causes.items() if w != worker}
            self._where[worker] = member.where
        self._news.set()

    def _set_members(self, members: Mapping[int, Member]) -> None:
        self._members = dict(sorted(members.items()))
        self.workers = tuple(self._members)
        blocks = tuple(member.block for member in members.values())
        self._all_blocks = blocks if len(blocks) == self._num_workers and min(blocks) >= 0 else ()
        self._has_worker_here = os.getpid() in (member.pid for member in members.values())

    def _release_when_dead(self, member: Member) -> None:
        """A process that was disconnected may still read its slot: its words are its own until it ends."""
        if member.block < 0 or self._closed:
            self._release(member)
        else:
            self._leftovers.add(member)
            asyncio.get_running_loop().add_reader(member.pidfd, self._release, member)

    def _release(self, member: Member) -> None:
        self._leftovers.discard(member)
        with suppress(ValueError, OSError):
            asyncio.get_running_loop().remove_reader(member.pidfd)
        if member.block >= 0 and self._arena is not None:
            self._arena.close_block(member.block)
        if member.pidfd >= 0:
            os.close(member.pidfd)

    # --- Outlet: called under the sender's lock, but for `disconnect` and `close` ---

    def causes(self) -> Mapping[int, str]:
        return self._causes

    def connect(self, processes: Processes | None, deadline: float | None) -> None:
        with watched(processes, self._num_workers) as sentinels:
            self._loop.call(self._meet(range(self._num_workers), sentinels, deadline))

    def readmit(self, worker: int, process: Any, deadline: float | None) -> None:
        with watched(None if process is None else {worker: process}, self._num_workers) as sentinels:
            member = self._members.get(worker)
            if member is not None and not (member.fresh and may_run(member.pid, process)):
                self._loop.call(self._end(member, "it was disconnected by disconnect() or readmit()"))
            self._loop.call(self._meet([worker], sentinels, deadline))
        newest = self._newest[worker]
        if newest is not None and not self._on_request:
            causes = self.wait([worker], newest.version, "installed", deadline)
            raise_causes(causes, "version {} could not be given to the replacement", newest.version)

    async def _meet(self, workers: Iterable[int], sentinels: Mapping[int, int], deadline: float | None) -> None:
        """Wait until workers are connected; what ``sentinels`` watch ends the wait."""
        loop, dead = asyncio.get_running_loop(), set[int]()

        def note_death(worker: int, fd: int) -> None:
            dead.add(worker)
            loop.remove_reader(fd)
            self._news.set()

        self._listener.start(self._welcome)
        self._rejected.clear()
        self._refused = ""
        missing = [worker for worker in workers if worker not in self._members]
        each = _BY_SOCKET if self._arena is None else _BY_ARENA
        require_descriptors(len(missing) * each, f"connections to {len(missing)} workers")
        own = [(worker, os.dup(fd)) for worker, fd in sentinels.items()]  # Ctrl-C ends the call, and this goes on
        for worker, fd in own:
            loop.add_reader(fd, note_death, worker, fd)
        try:
            async with asyncio.timeout(remaining(deadline)):
                while missing := [worker for worker in workers if worker not in self._members]:
                    if self._closed:
                        raise NotConnected("the sender was shut down meanwhile")
                    rejected = {w: Cause("failed", text) for w, text in self._rejected.items() if w in workers}
                    raise_causes(rejected, "weights do not fit")
                    if died := dead.intersection(missing):
                        causes = dict.fromkeys(sorted(died), "its process has ended before it has connected")
                        ended = f"worker(s) {join_indices(died)} ended before they had connected"
                        raise WorkerDied(ended + self._refused, causes)
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            late, connected = "did not connect in time", join_indices(self._members) or "none"
            longer = "if they need longer to start, give a larger timeout=" + self._refused
            message = f"worker(s) {join_indices(missing)} {late} (connected: {connected}): {longer}"
            raise SyncTimeout(message, dict.fromkeys(missing, late)) from None
        finally:
            for _, fd in own:
                loop.remove_reader(fd)
                os.close(fd)
        for worker in workers:
            self._members[worker].fresh = False

    def set_layout(self, layout: Layout) -> None:
        if self._arena is not None:
            self._arena.set_layout(layout)
        self._layout = layout
        self._loop.post(self._complete_layouts)

    def _complete_layouts(self) -> None:
        """Send the layout to workers that have connected before it was set, and were not asked about it."""
        for member in self._members.values():
            if not member.has_layout:
                self._tasks.add(task := asyncio.ensure_future(self._send_layout(member)))
                task.add_done_callback(self._tasks.discard)

    async def _send_layout(self, member: Member) -> None:
        assert self._layout is not None
        member.has_layout = True
        await member.session.ask(self._layout.encode())

    def check_layout(self, layout: Layout, deadline: float | None) -> Mapping[int, Cause]:
        return self._loop.call(self._check_layout(layout.encode(), deadline))

    async def _check_layout(self, layout: bytes, deadline: float | None) -> Mapping[int, Cause]:
        members = self._members
        causes = await self._ask({w: one.session.ask(layout) for w, one in members.items()}, deadline)
        for member in members.values():
            member.has_layout = not causes
        return causes

    def verify(self, digests: Mapping[int, dict[str, int]], deadline: float | None) -> Mapping[int, Cause]:
        async def verify(worker: int, own: dict[str, int]) -> str | None:
            member, newest = self._members.get(worker), self._newest[worker]
            if member is None:
                return None
            if newest is not None and member.block < 0 and not self._on_request:  # entering the gate installs it then
                await member.session.settled(newest.version, "ready")
            return await member.session.verify(own)

        return self._loop.call(self._ask({worker: verify(worker, own) for worker, own in digests.items()}, deadline))

    async def _ask(self, asked: Mapping[int, Awaitable[str | None]], deadline: float | None) -> Mapping[int, Cause]:
        """Wait for the answers of workers; return those that are not empty, or why there is none."""
        causes = dict.fromkeys(asked, LATE)

        async def note(worker: int, answer: Awaitable[str | None]) -> None:
            said, ended = await answer, self._causes.get(worker, "it has ended")
            causes[worker] = Cause("died", ended) if said is None else Cause("failed", said)

        with suppress(TimeoutError):
            async with asyncio.timeout(remaining(deadline)):
                await asyncio.gather(*(note(worker, answer) for worker, answer in asked.items()))
        return {worker: cause for worker, cause in causes.items() if cause.text}

    def seen(self, worker: int, version: int) -> dict[str, Any]:
        member, newest, arena = self._members.get(worker), self._newest[worker], self._arena
        row = {} if newest is None else {"sent": newest.version, "sent_at": newest.at}
        if member is None:
            why = self._causes.get(worker) or self._rejected.get(worker, "")
            return {**row, "where": self._where.get(worker, ""), "error": why}
        session, by_words = member.session, arena if member.block >= 0 else None
        installed = session.reported.installed if by_words is None else by_words.installed(member.block)
        refused, why = session.refused
        used, used_at = session.verified.used or (None, None)
        row |= {"where": member.where, "installed": installed, "used": used, "used_at": used_at}
        return {**row, "error": why if refused > installed else ""}

    def reserve(self, deadline: float | None) -> Buffer:
        assert self._layout is not None, "set_layout() comes first"
        if self._has_worker_here and process_gate().held_here:
            raise RuntimeError(
                "call send() outside any forward and any wsync.gate() block: a worker is in this process"
            )
        return self._pool.reserve(self._layout) if self._arena is None else self._arena.reserve(deadline)

    def publish(self, update: Update, workers: Sequence[int]) -> bool:
        """Give ``workers`` the update; return whether every forward that starts now uses it, and that is enough."""
        with self._lock:
            if len(workers) == self._num_workers:
                given = self._members
                self._newest = [update] * self._num_workers
            else:
                given = self._choose(workers)
                for worker in workers:
                    self._newest[worker] = update
            alive = self._give(update, given, update.acknowledge)
            if alive and not update.acknowledge and given is self._members and self._all_blocks:
                return True
            self._note_given(update.version, given)
        if not alive:  # the control thread ends sessions of dead processes, so that `wait` names them
            self._loop.call(asyncio.sleep(0))
        return False

    def _choose(self, workers: Sequence[int]) -> Mapping[int, Member]:
        return {worker: member for worker, member in self._members.items() if worker in workers}

    def _note_given(self, version: int, members: Mapping[int, Member]) -> None:
        before = self._given.get(version)
        if before is None and len(self._given) > 1000:  # of a trainer that never waits
            del self._given[next(iter(self._given))]
        self._given[version] = {**before, **members} if before else members

    def _give(self, update: Update, members: Mapping[int, Member], acknowledge: bool) -> bool:
        """Hand an update to members: a word for those that use the arena, an offer to the sessions of the others.

        Returns False if a process was found to have ended.
        """
        arena, blocks, others = self._arena, self._all_blocks, ()
        if update.version > self._version:
            self._version = update.version
        if not blocks or members is not self._members:
            blocks = tuple(one.block for one in members.values() if one.block >= 0)
            others = [one.session for one in members.values() if one.block < 0]
        if others:
            self._add_checksum(update, others)
            for session in others:
                self._loop.post(session.offer, update)
        if arena is None or not blocks:
            return True
        if update.extra or update.requires:
            if update.requires != self._serial_of:
                self._serial, self._serial_of = self._serial + 1, dict(update.requires)
            arena.store_header(update, self._serial if update.requires else 0)
        if not update.undecided:
            return arena.publish(blocks, update.version, update.buffer.slot, acknowledge)
        for member in members.values():
            if member.block >= 0:
                self._loop.post(member.session.post, Offer(update.version, 0, slot=update.buffer.slot))
        return True

    def _add_checksum(self, update: Update, sessions: Iterable[WorkerSession]) -> None:
        """Add a checksum where weights cross a network, or a medium wants one; not if they are on a GPU."""
        if not update.checksum and update.buffer.flat.is_cpu and any(one.checks for one in sessions):
            update.checksum = checksum_of(update.buffer.memory, update.extra)

    def wait(self, workers: Sequence[int], version: int, stage: Stage, deadline: float | None) -> Mapping[int, Cause]:
        given = self._given.get(version, self._members)
        usual = stage == "installed" and given is self._members and len(workers) == self._num_workers
        # A refusal ends one wait in the arena, perhaps that for another version: then look what was refused.
        usual = usual and all(one.session.refused[0] < version for one in given.values())
        blocks, arena = self._all_blocks if usual else (), self._arena
        if blocks and arena is not None and arena.wait(blocks, version, remaining(deadline)):
            self._given.pop(version, None)
            return {}
        present = {worker: given[worker] for worker in workers if worker in given}
        causes = {w: Cause("died", self._causes.get(w, "it has ended")) for w in workers if w not in present}
        by_words = {w: one for w, one in present.items() if one.block >= 0 and stage != "received"}
        others = {w: one.session for w, one in present.items() if w not in by_words}
        if by_words:
            causes |= self._wait_for_words(by_words, version, stage, deadline)
        if others:
            causes |= self._loop.call(wait_for(others, version, stage, deadline))
        if not causes and stage != "received":
            self._given.pop(version, None)
        return causes

    def _wait_for_words(
        self, members: Mapping[int, Member], version: int, stage: Stage, deadline: float | None
    ) -> dict[int, Cause]:
        arena, causes, pending = self._arena, {}, dict(members)
        assert arena is not None
        while True:
            for worker, member in list(pending.items()):
                state = member.session.state(version, stage, arena.installed(member.block))
                if state is False and stage == "installed":  # what is published is ready as soon as it is stored
                    continue
                if isinstance(state, Cause):
                    causes[worker] = state
                del pending[worker]
            if not pending or remaining(deadline) == 0.0:
                return causes | dict.fromkeys(pending, HELD)
            arena.wait(tuple(one.block for one in pending.values()), version, remaining(deadline))

    def costs(self, workers: Sequence[int], version: int) -> tuple[float, float, int]:
        members = [self._members[worker] for worker in workers if worker in self._members]
        blocks = [one.block for one in members if one.block >= 0]
        sessions = [one.session for one in members if one.block < 0]
        times = self._arena.times(blocks) if self._arena is not None else []
        times += [(one.reported.wait, one.reported.apply) for one in sessions]
        sent = [0] if blocks else [one.sent_bytes * (one.reported.received >= version) for one in sessions]
        return *max(times, key=sum, default=(0.0, 0.0)), max(sent, default=0)

    def disconnect(self, worker: int, cause: str) -> None:
        member = self._members.get(worker)
        if member is not None:
            self._loop.call(self._end(member, cause))

    async def _end(self, member: Member, cause: str) -> None:
        member.session.end(cause)

    # --- transactions ---

    def prepare(self, update: Update, workers: Sequence[int]) -> None:
        with self._lock:
            given = self._choose(workers)
            self._note_given(update.version, given)
            self._give(update, given, update.acknowledge)

    def announce_commit(self, update: Update, workers: Sequence[int]) -> None:
        with self._lock:  # a worker that connects from now on is given the update
            for worker in workers:
                self._newest[worker] = update
            blocks = tuple(one.block for one in self._choose(workers).values() if one.block >= 0)
            if self._arena is not None and blocks:
                self._arena.set_pending(blocks, update.version, update.buffer.slot)

    def commit(self, update: Update, workers: Sequence[int]) -> None:
        with self._lock:
            prepared = self._given.get(update.version, {})
            present = self._choose(workers)
            self._note_given(update.version, present)
            # In the arena the word is stored now. Others have the update, unless they have connected since.
            lacking = {w: one for w, one in present.items() if one.block >= 0 or prepared.get(w) is not one}
            self._give(update, lacking, update.acknowledge)
        for member in prepared.values():
            self._loop.post(member.session.decide, update.version, commit=True)

    def abort(self, version: int) -> None:
        for member in self._given.pop(version, {}).values():
            self._loop.post(member.session.decide, version, commit=False)

    # --- the end ---

    def published(self) -> list[Buffer]:
        return list({id(one.buffer): one.buffer for one in self._newest if one is not None}.values())

    def close(self, *, graceful: bool) -> None:
        """Tell the workers, and release everything."""
        if self._closed or self._loop.inherited:
            return
        if self._loop.here:  # garbage collection runs in any thread
            threading.Thread(target=self.close, name="wsync-close", kwargs={"graceful": graceful}).start()
            return
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        with suppress(TimeoutError, NotConnected):
            self._loop.call(self._close(graceful), time.monotonic() + 2 * _FAREWELL)
        if self._arena is not None:
            self._arena.close()
        self._newest, self._given = [None] * self._num_workers, {}
        self._pool = BufferPool("cpu")
        self._loop.release()

    async def _close(self, graceful: bool) -> None:
        self._listener.close()
        self._news.set()  # `connect` in another thread ends
        if graceful and self._members:
            farewells = [asyncio.ensure_future(one.session.finish()) for one in self._members.values()]
            await asyncio.wait(farewells, timeout=_FAREWELL)
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_FAREWELL)
        for member in [*self._leftovers]:
            self._release(member)


async def _difference(delta: Delta, known: dict[Any, Awaitable[Any]], base: Update, new: Update) -> bytes | None:
    """Return what turns one version into another; it is made once for several workers, beside the control thread."""
    key = base.version, id(base.buffer), new.version, id(new.buffer)  # a buffer has one version after the other

    def make() -> bytes | None:
        return delta.difference(base.buffer.memory, new.buffer.memory, new.buffer.layout.width)

    if key not in known:
        known.clear()
        known[key] = asyncio.ensure_future(run_blocking("difference", make))
    return await asyncio.shield(known[key])


def raise_causes(causes: Mapping[int, Cause], what: str, version: int | None = None, have: Sequence[int] = ()) -> None:
    """Raise one error that names each worker, its cause and the survivors; if there is no cause, do nothing.

    It is a ``WorkerDied``, a ``WorkerFailed`` or a ``SyncTimeout``, by the gravest cause.
    """
    if not causes:
        return
    texts = {worker: cause.text for worker, cause in sorted(causes.items())}
    by_line: dict[str, list[int]] = {}
    for worker, text in texts.items():
        by_line.setdefault(last_line(text), []).append(worker)
    lines = [f"worker{'s' * (len(some) > 1)} {join_indices(some)}: {line}" for line, some in by_line.items()]
    if have:
        lines.append(f"workers that have it: {join_indices(have)}")
    lines += [f"worker {worker}: {text.strip()}" for worker, text in texts.items() if "\n" in text.strip()]
    kinds = {cause.kind for cause in causes.values()}
    kind = WorkerDied if "died" in kinds else WorkerFailed if "failed" in kinds else SyncTimeout
    if kind is SyncTimeout and version is not None:
        lines.append("A silent worker stays connected. To replace it: disconnect(index), kill it, readmit(index, …)")
    message = f"{what.format(version)} on " + "\n".join(lines)
    raise kind(message, texts, version, [worker for worker, cause in causes.items() if cause.kind == "failed"])
