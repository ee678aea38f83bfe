"""The worker's end of a scheme: installs updates in the model, between two forwards.

    control thread   an update arrives → gate.settle ─┐
    acting thread    gate.call (a forward) ───────────┴→ poll_update → inbox.poll → target.install → inbox.answer

Whoever enters the gate first installs: the control thread if the gate is free, else the thread that holds it, on
leaving; or the acting thread on its way into a forward.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import torch
from torch._guards import active_fake_mode

from wsync.control.loop import control_loop, run_blocking
from wsync.control.session import choose
from wsync.deadlines import deadline_in, remaining
from wsync.errors import LayoutMismatch, NotConnected, SyncTimeout, WeightSyncError, error_of
from wsync.gate import entered_for_forward_of, gate_model, process_gate, ungate_model
from wsync.update import LAST_VERSION, Inbox, Update
from wsync.weights.layout import Buffer, BufferPool, Layout
from wsync.weights.snapshot import require_digests
from wsync.weights.strategy import WeightStrategy
from wsync.weights.targets import Destination, Target, unshare

_PAUSE = 0.02  # seconds between two attempts to end the wait of a connecting thread
_LOOK_AGAIN = 0.1  # seconds until the gate is tried again
_receivers: list[Receiver] = []  # those of this process that are connected; changed inside the gate
os.register_at_fork(after_in_child=_receivers.clear)


class Receiver:
    """Installs one model's updates in one worker. It is a hook of the gate.

    ``gate``: as in ``WeightSyncScheme``. ``on_request``: updates are installed only by ``pull``, and before forwards
    that are more than ``max_staleness`` versions behind. ``timeout``: seconds that a forward waits for a version that
    it needs. ``pass_on``: passes an update on to workers of this worker; called after it is installed and before it is
    acknowledged, outside the gate, in a thread of its own. ``device``: where updates are received that do not come by
    the arena.
    """

    def __init__(
        self,
        model_id: str,
        destination: Destination,
        strategy: WeightStrategy,
        *,
        bind: bool = True,
        gate: bool | Collection[str] = True,
        on_request: bool = False,
        max_staleness: int | None = None,
        timeout: float | None = None,
        pass_on: Callable[[], object] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.model_id = model_id
        self.destination = destination
        self.connection: Inbox  # the way to the sender; set by the scheme
        self.inbox: Inbox = Inbox()  # what has its updates; set by the connection
        self.sender = ""  # identifies the sender of the present connection
        self.worker_idx, self._version = -1, 0
        self._used = 0, 0.0  # as ``used``, on ``time.perf_counter``
        self.announced_at = 0.0  # when the control thread has seen the newest update, if that came by a connection
        self.bind, self.on_request, self._gate = bind, on_request, gate
        self._strategy = strategy
        self._max_staleness, self._timeout = max_staleness, timeout
        self.pass_on = pass_on
        self._passing: Update | None = None  # installed, and to be passed on
        self._passed = 0  # the newest version that was
        self._target: Target | None = None
        self._layout: Layout | None = None
        self._pool = BufferPool(device)
        self._bound: Buffer | None = None  # of the version that the model has: its parameters may point there
        self._broken: Callable[[], WeightSyncError] | None = None  # why forwards are refused, if they are
        self._failed_version, self._failure = 0, ""
        self._first = LAST_VERSION  # the version that `connect` has installed
        self._unanswered: tuple[Update, str, float, float] | None = None  # as ``Inbox.answer`` takes it
        self._next_look: asyncio.TimerHandle | None = None
        self._pulling = 0  # threads that want the newest version
        self._returned = 0  # the version that `receive` or `pull` has returned last
        self._end_returned = False
        self._connecting: Future[None] | None = None
        self._waiters: set[queue.SimpleQueue[None]] = set()
        # new: before ``connect``. finished: the sender or this end has shut down. lost: the sender died, or has
        # disconnected this worker, or ``connect`` has failed.
        self.phase: Literal["new", "open", "finished", "lost"] = "new"
        self._hook: Any = self  # of the gate: this object, or compiled code that calls it
        self._end_cause = ""
        self.loop = control_loop()

    # --- the gate's hook: called inside the gate ---

    def poll_update(self) -> bool:
        """Install the version that the next forward has to use; return whether other models have changed, too.

        WeightSyncError: for a forward of this model, which cannot be used; or its newest version did not come.
        """
        again = False
        if not self.on_request or self._pulling or self._is_too_old():
            updates = self.inbox.poll()
            if updates and active_fake_mode() is None:  # `torch.export` has put fake tensors in the model's place
                again = self._install_newest(updates)
        if self._broken and entered_for_forward_of(self.destination.model):
            raise self._broken()
        return again

    def leaving_gate(self, forward: bool) -> None:
        """A thread leaves the gate; ``forward``: after a forward."""
        if forward and self._used[0] != self.version:
            self._used = self.version, time.perf_counter()
        self.inbox.leave()
        self._answer()

    def ready_version(self) -> int:
        """Return the version that a forward that starts now would use."""
        chosen = choose(self._siblings()).get(self) if self in process_gate().hooks else None
        return self.version if chosen is None else chosen.version

    def _siblings(self) -> list[Receiver]:
        """The models of this worker, this one among them."""
        return [one for one in [*_receivers] if one.worker_idx == self.worker_idx]

    def _install_newest(self, updates: Sequence[Update]) -> bool:
        update = updates[-1]
        if not update.requires or len(self._siblings()) == 1:
            self.install(update)
            return bool(self._broken)  # then this hook is called again, and raises if the forward uses this model
        chosen = choose(self._siblings())
        for receiver, one in chosen.items() if len(chosen) > 1 else ():
            one.damage = one.damage or error_of(receiver.check, one)
        for receiver, one in sorted(chosen.items(), key=lambda pair: not pair[1].damage):
            if receiver.install(one):  # then the others may not be installed without it
                break
        return len(chosen) > 1

    def _is_too_old(self) -> bool:
        """Whether the forward that starts now needs a newer version, which is fetched; SyncTimeout: it did not come."""
        if self._max_staleness is None or self.phase != "open":
            return False
        newest = self.inbox.newest
        if newest - self.version <= self._max_staleness or not entered_for_forward_of(self.destination.model):
            return False
        behind = f"more than max_staleness={self._max_staleness} behind: the model has version {self.version}"
        if newest <= self._failed_version:
            raise WeightSyncError(f"version {self._failed_version} was not installed; the forward would be {behind}")
        try:
            self.connection.fetch(deadline_in(self._timeout))
        except TimeoutError:
            raise SyncTimeout(f"version {newest} did not come within {self._timeout} s: {behind}") from None
        return True

    def install(self, update: Update) -> str:
        """Install an update, answer, and return why that failed: the model is as it was, or forwards are refused."""
        started = time.perf_counter()
        wait = max(0.0, started - self.announced_at) if self.announced_at else 0.0
        error = update.damage or error_of(self._apply, update)
        self._unanswered = update, error, wait, time.perf_counter() - started
        self.announced_at = 0.0
        if error:
            self._failed_version, self._failure = update.version, error
            self._break_if_unusable(update, error)
        else:
            self._version, self._bound, self._broken = update.version, update.buffer, None
            self._failed_version = 0  # a store's next trainer may begin below it
        self.inbox.settled(update, error)
        self._answer()
        if self._waiters:
            self._notify()
        return error

    def _answer(self) -> None:
        """Answer what was installed last; called again when the gate is left, if a signal has ended the first call."""
        if self._unanswered is None:
            return
        update, error, wait, apply = self._unanswered
        if self.pass_on is not None and not error:
            self._passing = update
            self.loop.post(lambda: asyncio.ensure_future(self._pass(update)))
        else:
            self.inbox.answer(update, error, wait, apply)
        self._unanswered = None

    def _apply(self, update: Update) -> None:
        self.set_layout(update.buffer.layout)  # another one, where a store's trainer has begun anew
        assert self._target is not None
        self._target.install(update.views, self.destination.extra_of(update.extra))

    def _break_if_unusable(self, update: Update, error: str) -> None:
        failure = f"worker {self.worker_idx}: version {update.version} of '{self.model_id}' could not be installed"
        if self._target is not None and self._target.mixed:
            text = f"{failure}, and the model may have weights of two versions until one is:\n{error}"
            self._broken = partial(WeightSyncError, text)
        elif self._target is not None and self._target.misfit:
            self._broken = partial(LayoutMismatch, f"{failure}; until a version fits, forwards are refused:\n{error}")

    async def _pass(self, update: Update) -> None:
        """Pass an update on, unless a newer one was installed meanwhile, and is passed on instead."""
        async with self._in_order:
            if self._passing is not update or self.pass_on is None:
                return
            error = await run_blocking("cascade", error_of, self.pass_on)
            if not error:
                self._passed = update.version
            self.inbox.answer(update, error, 0.0, 0.0)
            if self._passing is update:
                self._passing = None
                self._notify()

    # --- the owner of a connection: called in the control thread ---

    async def use_layout(self, layout: bytes) -> str:
        """Use weights of this layout from now on; return why they do not fit."""
        return await self.inside(self.set_layout, Layout.decode(layout))

    def set_layout(self, layout: Layout) -> None:
        """As ``use_layout``, inside the gate; LayoutMismatch: they do not fit."""
        if self._layout == layout and self._target is not None:
            return
        if self.destination.module is not None:
            unshare(self.destination.module)
        self._target = self.destination.target(layout, bind=self.bind and self.inbox.binds)
        self._layout = layout
        self.inbox.use(layout, self._target)

    def check(self, update: Update) -> None:
        """Raise what installing an update would raise. Called inside the gate."""
        self.set_layout(update.buffer.layout)  # the first one, or another one, in a store
        assert self._target is not None
        self._target.check_only(update.views, self.destination.extra_of(update.extra))

    def verify(self, digests: dict[str, int]) -> None:
        """Raise ``LayoutMismatch`` if the model's tensors have other digests. Called inside the gate."""
        require_digests(self.destination.model, digests, self.version)

    async def inside(self, function: Callable[..., object], *args: Any) -> str:
        """Call ``function`` inside the gate, as soon as that is free; return the error that it raises."""
        loop, result = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def job() -> None:
            found = error_of(function, *args)
            loop.call_soon_threadsafe(lambda: result.done() or result.set_result(found))

        process_gate().soon(job)
        return await result

    def new_buffer(self) -> Buffer:
        """Return room for one update."""
        assert self._layout is not None, "an update before its layout"
        return self._pool.reserve(self._layout)

    def announce(self) -> bool:
        """Install what has arrived, if the gate is free; return whether it was. Called by any thread."""
        self.announced_at = time.perf_counter()
        return process_gate().settle()

    def settle(self) -> None:
        """As ``announce``. If the gate is not free, look again later: a signal may have stopped its holder's look."""
        if not self.announce() and self._next_look is None:
            self._look_again()

    def _look_again(self) -> None:
        free, loop = process_gate().settle(), asyncio.get_running_loop()
        self._next_look = None if free else loop.call_later(_LOOK_AGAIN, self._look_again)

    def missed(self, version: int, error: str) -> None:
        """A version has not arrived, and will not."""
        self._failure, self._failed_version = error, version
        self._notify()

    def ended(self, cause: str, *, finished: bool) -> None:
        """The connection has ended."""
        if self.phase == "open":
            self.phase, self._end_cause = "finished" if finished else "lost", cause
        self._notify()

    # --- connect and close ---

    def connect(self, worker_idx: int, timeout: float | None) -> None:
        """Connect to the sender, and install the first weights if it has any yet; see ``WeightSyncScheme.connect``."""
        self._connect(worker_idx, timeout)
        self._connecting = None

    def connect_in_thread(self, worker_idx: int, timeout: float | None) -> None:
        """Begin to ``connect``; ``receive`` and ``pull`` wait for it, and raise what it raises."""
        connecting = self._connecting = Future[None]()

        def connect() -> None:
            try:
                self._connect(worker_idx, timeout)
                connecting.set_result(None)
            except BaseException as error:  # noqa: BLE001  raised again
                connecting.set_exception(error)

        threading.Thread(target=connect, name="wsync-connect", daemon=True).start()

    def _connect(self, worker_idx: int, timeout: float | None) -> None:
        self._require_outside("connect()")
        if self.phase == "open":
            raise RuntimeError(f"worker {self.worker_idx} is connected already: connect() was called twice")
        self.connection.close()
        deadline = deadline_in(timeout)
        try:
            process_gate().call_without_forward(self._open, worker_idx)
            first = self.connection.connect(worker_idx, deadline)
            self._hook = self.inbox.words or self
            process_gate().attach(self._hook)
            if first and self.on_request:
                self._pulling += 1
                with suppress(TimeoutError):
                    self.connection.fetch(deadline)
            # Where updates are passed on, the first one has been when this returns.
            self._wait(deadline, lambda: (self._tried >= first and self._passing is None) or None)
            if self._tried < first or self._passing is not None:
                late = SyncTimeout(f"worker {worker_idx}: the first weights did not come in time")
                raise self._ended_error() if self.closed else late
            if self.version < first:
                raise WeightSyncError(f"worker {worker_idx} could not install its first weights:\n{self._failure}")
            self._returned = self._first = first
        except BaseException:
            self.close()
            self.phase = "lost"
            raise
        finally:
            self._pulling = 0  # no other thread can pull yet

    def _open(self, worker_idx: int) -> None:
        """Begin anew; other models are never without what they require of this one. Called inside the gate."""
        self._detach()
        self.worker_idx, self._version, self._returned, self._failed_version = worker_idx, 0, 0, 0
        self._passing, self._passed, self._in_order, self._used = None, 0, asyncio.Lock(), (0, 0.0)
        self._end_returned, self.phase = False, "open"
        if self.destination.module is not None and self._gate is not False:
            gate_model(self.destination.module, None if self._gate is True else self._gate)
        _receivers.append(self)

    def shutdown(self) -> None:
        """``close``, and end the thread of ``connect_in_thread``."""
        self.close()
        while self._connecting is not None and not self.loop.inherited:
            ended = wait([self._connecting], _PAUSE).done
            self.close()  # again: the thread may not have begun to wait for the sender before
            if ended:
                self._connecting = None

    def close(self) -> None:
        """Close the connection; the model keeps its weights, in its own memory. Idempotent."""
        if self.phase == "open":
            self.phase = "finished"
        if self.loop.inherited:
            return
        self.connection.close()
        process_gate().call_without_forward(self._detach)
        self._notify()

    def _detach(self) -> None:
        process_gate().detach(self._hook)
        newest = max(self.version, self.inbox.newest)
        unseen = not self.used[0] or (self.version == self._first < newest - 1)
        if newest > max(self._first, 1) and unseen and self.destination.module is not None and self._gate:
            warnings.warn(
                f"worker {self.worker_idx}: updates up to version {newest} of '{self.model_id}' came, and its model "
                "was not called through the gate since, where they are installed between two forwards. What bypasses "
                "it, such as an exported or traced copy: docs/lifecycle.md",
                stacklevel=2,
            )
        if self in _receivers:
            _receivers.remove(self)
        self.copy_to_own_memory()
        self._version, self._target, self._layout, self._bound, self._broken = self.version, None, None, None, None
        self._unanswered = None  # the next connection has another sender
        self.inbox.close()
        self.inbox = Inbox()
        module = self.destination.module
        if module is not None and not any(one.destination.module is module for one in _receivers):
            ungate_model(module)

    def copy_to_own_memory(self) -> None:
        """Give the model memory of its own until the next update, so that it may be written. Called inside the gate."""
        if self._target is not None:
            self._target.detach()
            self.inbox.release()

    # --- versions; called by the worker's own threads, outside the gate ---

    @property
    def version(self) -> int:
        """The version that the model has; 0 before the first."""
        words = self.inbox.words
        return self._version if words is None else max(words.version, self._version)

    @property
    def used(self) -> tuple[int, float]:
        """The version that a forward, ``receive`` or ``pull`` has used last (0: none), and since when (Unix time)."""
        words = self.inbox.words
        version, at = self._used if words is None else (words.used, words.used_at)
        return version, time.time() - time.perf_counter() + at if version else 0.0

    @property
    def _tried(self) -> int:
        """The newest version that is installed, or could not be."""
        return max(self.version, self._failed_version)

    @property
    def passed_version(self) -> int:
        """The version that the model has; where updates are passed on, the newest that was."""
        return self.version if self.pass_on is None else self._passed

    @property
    def closed(self) -> bool:
        """Whether there will be no more versions."""
        return self.phase in ("finished", "lost")

    def weights(self) -> Any:
        """Return the weights in the strategy's format, not copied; the version number if there is no model."""
        model = self.destination.model
        return self.version if model is None else self._strategy.extract_weights(model)

    def receive(self, timeout: float | None, take: Callable[[], Any] | None = None) -> Any | None:
        """Wait for the next version; return what ``take()`` (default: ``weights``), called inside the gate, returns."""
        deadline, take = deadline_in(timeout), take or self.weights
        if not self._has_begun("receive()", timeout):
            return None
        end_returned = self._end_returned

        def attempt() -> Any | None:
            if self.version <= self._returned:
                return None
            if self._broken:
                raise self._broken()
            taken = take()
            self._hook.leaving_gate(True)  # the caller uses them
            self._returned = self.version
            return taken

        taken = self._wait(deadline, attempt)
        if taken is None and self.closed:
            if end_returned or self.phase == "lost":
                raise self._ended_error()
            self._end_returned = True
        return taken

    def pull(self, timeout: float | None) -> int:
        """Install the newest version, and return its number; see ``WeightSyncScheme.pull``."""
        deadline = deadline_in(timeout)
        if not self._has_begun("pull()", timeout):
            raise SyncTimeout(f"worker {self.worker_idx} has not connected yet")
        self._pulling += 1
        try:
            if not self.closed:
                self.connection.fetch(deadline)
            process_gate().install()
            self._wait(deadline, lambda: self._tried or None)
        except TimeoutError:
            raise SyncTimeout(f"worker {self.worker_idx}: the newest version did not come in time") from None
        finally:
            self._pulling = max(0, self._pulling - 1)  # `connect` in another thread may have set it to 0
        if not self._tried and not self.closed:
            raise SyncTimeout(f"worker {self.worker_idx}: there is no version yet")
        return process_gate().call_without_forward(self._mark_returned)

    def fetch(self, deadline: float | None) -> int:
        """Have the newest version arrive, and install nothing; return its number. WeightSyncError: it is damaged."""
        self.connection.fetch(deadline)
        return process_gate().call_without_forward(self._check_fetched)

    def _check_fetched(self) -> int:
        updates = self.inbox.poll()
        if not updates:
            return self.version
        self.set_layout(updates[-1].buffer.layout)
        if updates[-1].damage:
            raise WeightSyncError(updates[-1].damage)
        return updates[-1].version

    def _mark_returned(self) -> int:
        if self._failed_version > self.version:
            raise WeightSyncError(
                f"worker {self.worker_idx}: version {self._failed_version} could not be installed and is not tried "
                f"again. Newest installed version: {self.version or 'none'}. The error:\n{self._failure}"
            )
        if self.closed and self.version <= self._returned:
            raise self._ended_error()
        self._hook.leaving_gate(True)  # the caller uses it
        self._returned = self.version
        return self.version

    def _require_outside(self, call: str) -> None:
        self.loop.require_own()
        if process_gate().held_here:
            raise RuntimeError(f"call {call} outside any forward and any wsync.gate() block")

    def _has_begun(self, call: str, timeout: float | None) -> bool:
        """Wait until ``connect_in_thread`` has connected; return whether it has. NotConnected: nothing connects."""
        self._require_outside(call)
        if self._connecting is not None:
            if not wait([self._connecting], timeout).done:
                return False
            self._connecting.result()
        elif self.phase == "new":
            raise NotConnected(f"not connected yet: call connect(worker_idx=…) before {call}")
        return True

    def _ended_error(self) -> NotConnected:
        if self.phase == "finished":
            return NotConnected("the sender (or this end) has shut down: there will be no more weights")
        return NotConnected(
            "the sender died, ended without shutdown(), or has disconnected this worker: there will be no more weights"
            f" ({self._end_cause})"
        )

    def _wait(self, deadline: float | None, attempt: Callable[[], Any]) -> Any | None:
        """Call ``attempt`` inside the gate at each change until it returns a result; None at the deadline or end."""
        changes = queue.SimpleQueue[None]()
        try:
            self._waiters.add(changes)
            process_gate().soon(self._set_wakeups)
            while True:
                closed = self.closed  # before the attempt: what came before the end counts
                result = process_gate().call_before(deadline, attempt)
                if result is not None or closed or remaining(deadline) == 0.0:
                    return result
                try:
                    changes.get(timeout=remaining(deadline))
                except queue.Empty:
                    continue
        finally:
            self._waiters.discard(changes)
            process_gate().soon(self._set_wakeups)

    def _set_wakeups(self) -> None:
        self.inbox.set_wakeups(bool(self._waiters))
        self._notify()  # if another thread has held the gate, an update may have come before

    def _notify(self) -> None:
        for waiter in [*self._waiters]:
            waiter.put(None)
