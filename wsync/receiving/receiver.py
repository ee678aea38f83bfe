"""The receive path: what a worker does with an update, the same for every backend.

    told (thread) ─→ gate ─→ end.enter() ─→ binding.install ─→ answer

An update is installed by whoever comes through the gate first: the acting thread on its way into a forward, or the
receiver thread when it was told. Either answers the sender.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from wsync.deadlines import deadline_in
from wsync.errors import NotConnected, WeightSyncError
from wsync.receiving import staged
from wsync.receiving.end import ReceiverEnd
from wsync.receiving.events import Closed, Decision, Event, Follower, News, Proposal, Stage
from wsync.receiving.forking import following
from wsync.receiving.gate import guard, process_gate, release
from wsync.receiving.versions import Versions
from wsync.types import ANY_VERSION, Ack, Update
from wsync.weights.binding import Binding, load_extra, unshare
from wsync.weights.strategy import WeightStrategy


class Receiver(Versions):
    """One model in one worker: takes what comes, and answers.

    Args:
        model: is gated from ``knock`` or ``connect`` on.
        strategy: the format in which ``receive`` returns weights.
        end: the worker's end of the line.
        bind: whether parameters may be bound to the received memory.
        cascade: called after each update was installed, before the sender is answered.
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: WeightStrategy,
        end: ReceiverEnd,
        *,
        bind: bool,
        cascade: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(end)
        self.model = model
        self.worker_idx = -1
        self._strategy = strategy
        self._feed: Follower = self
        self._bind = bind
        self._cascade = cascade
        self._owed: Update | None = None  # installed, but its answer has to wait for the cascade
        self._binding: Binding | None = None
        self._attached = False
        self._orphaned = False
        self.told_at = 0.0
        self._error = ""

    def knock(self, worker_idx: int, timeout: float | None) -> Sequence[int]:
        """Begin ``connect``: descriptors, one of which is readable when the rest of it need not wait for the sender.

        The model is gated from here on: whoever does the rest may do it while the model acts.

        Raises:
            NotConnected: no sender is there.
            SyncTimeout: there was no room at its door within ``timeout`` seconds.
        """
        self._begin_anew()
        signs = self._end.knock(worker_idx, deadline_in(timeout))
        self._guard()
        return signs

    def connect(self, worker_idx: int, timeout: float | None) -> None:
        """The rendezvous; returns with the first weights installed, if the sender has any yet.

        Raises:
            NotConnected: no sender, or it refused this worker.
            SyncTimeout: it did not answer within ``timeout`` seconds.
            LayoutMismatch: its weights do not fit the model.
            RuntimeError: this worker is connected already; it stays so.
            Exception: whatever else the model raised when it was gated. The sender gets the same error in either case.
        """
        self._begin_anew()
        self.worker_idx = worker_idx
        self._closed = False
        self._end.connect(worker_idx, deadline_in(timeout))
        try:
            if self._end.layout is not None:
                self._bind_model()
            self._guard()
        except Exception:
            self._end.answer(Ack(worker_idx, ANY_VERSION, traceback.format_exc()))
            self._end.close()
            raise
        gate = process_gate()
        self._feed = self._end.feed(self)
        gate.attach(self._feed)
        gate.turnstile.go_through()  # the first weights are there, if there are any
        self._pass_on()
        self._seen = self.version
        self._end.attach(self._feed)
        self._attached = True
        if self._error:
            error = self._error
            self.close()
            raise WeightSyncError(f"worker {worker_idx} could not install its first weights:\n{error}")

    def _begin_anew(self) -> None:
        """Let go of the line before, if there was one: a worker that was dismissed may come back."""
        if not self._attached:
            return
        if not self._closed and self._end.alive():
            raise RuntimeError(f"worker {self.worker_idx} is connected already: it calls connect() once")
        self.close()
        self._attached, self._binding = False, None

    def _guard(self) -> None:
        guard(self.model)
        process_gate().call(following.add, self)

    def _bind_model(self) -> Binding:
        if self._binding is None:
            layout = self._end.layout
            if layout is None:
                raise NotConnected("weights were announced before their layout")
            unshare(self.model)
            self._binding = Binding(self.model, layout, bind=self._bind)
            if self._binding.may_refuse:
                self._end.may_refuse()
        return self._binding

    # --- called inside the gate ---

    def enter(self) -> bool:
        """The gate asks for news: install what must be used from here on."""
        update = self._end.enter()
        if update is None:
            return False
        if staged.decide_by(self, update.version):
            return True
        self.install(update)
        return False

    def leave(self) -> None:
        """The gate is left."""
        self._end.leave()

    def install(self, update: Update) -> None:
        """Switch the model and answer. A failure leaves the model as it was, and goes to the sender."""
        started = time.perf_counter()
        wait = started - self.told_at if self.told_at else 0.0
        self._error = ""
        try:
            _require_whole(update)
            self._bind_model().install(update.views, load_extra(update.extra))
        except Exception:  # noqa: BLE001  whatever a model raises must reach the trainer, and not kill a forward
            self._error = traceback.format_exc()
        self._end.installed(update, self._error)
        if self._binding is not None and not (self._error or update.extra or self._cascade):
            self._end.arm(self._binding)
        self.told_at = 0.0
        if not self._error:
            self.came(update.version)
            if self._cascade is not None:
                self._owed = update
                return
        if update.acknowledge or self._error:
            apply = time.perf_counter() - started
            self._end.answer(Ack(self.worker_idx, update.version, self._error, wait=wait, apply=apply))

    # --- called by the receiver thread ---

    def on_readable(self) -> bool:
        """Do what the sender has said; False when it is gone."""
        return self.follow(self._end.events())

    def follow(self, events: Sequence[Event]) -> bool:
        """Do what was said; False when there will be nothing more."""
        for event in events:
            if isinstance(event, Closed):
                self.ended()
                return False
            self.told_at = time.perf_counter()
            process_gate().call(self._obey, event)
            self._pass_on()
        return True

    def _obey(self, event: News | Stage | Decision | Proposal) -> None:
        """What an event asks for, inside the gate; for news, entering it was all."""
        if isinstance(event, Stage):
            self._stage(event)
        elif isinstance(event, Decision):
            staged.decide(event.transaction, event.install)
        elif isinstance(event, Proposal):
            self._consider(event)
        self.told_at = 0.0  # the acting thread may have been first, and another update is another matter

    def _stage(self, event: Stage) -> None:
        error = ""
        try:
            _require_whole(event.update)
            self._bind_model().rehearse(event.update.views, load_extra(event.update.extra))
            staged.keep(event.transaction, self, event.update)
        except Exception:  # noqa: BLE001  the vote is no, and this is why
            error = traceback.format_exc()
        self._end.answer(Ack(self.worker_idx, event.update.version, error), staged=True)

    def _consider(self, proposal: Proposal) -> None:
        error = ""
        try:
            Binding(self.model, proposal.layout, bind=self._bind)
        except Exception:  # noqa: BLE001  the vote is no, and this is why
            error = traceback.format_exc()
        self._end.answer(Ack(self.worker_idx, proposal.version, error), staged=True)

    def _pass_on(self) -> None:
        """Cascade what was installed, and only then answer."""
        update, self._owed = self._owed, None
        if update is None or self._cascade is None:
            return
        error = ""
        try:
            self._cascade()
        except Exception:  # noqa: BLE001  the sender hears that the workers below do not have it
            error = traceback.format_exc()
        if update.acknowledge or error:
            self._end.answer(Ack(self.worker_idx, update.version, error))

    # --- called by the user ---

    def weights(self) -> Any:
        """The model's, not copied, in the strategy's format. Call it in the gate: they are one version there."""
        return self._strategy.extract_weights(self.model)

    def receive(self, timeout: float | None, take: Callable[[], Any] | None = None) -> Any | None:
        """What ``take()`` (by default ``weights``) makes of the next version: see ``Versions.await_next``."""
        return self.await_next(timeout, take or self.weights)

    def own_memory(self) -> None:
        """Give the model memory of its own until the next update: somebody is about to write. Call it in the gate."""
        if self._binding is not None:
            self._binding.detach()

    def orphan(self) -> None:
        """Hear no more, and say no more: this is a forked child of the worker."""
        super().orphan()
        self._orphaned = True

    def close(self) -> None:
        """Give the model its own memory and class back, and hang up; who waits in ``receive`` is let go."""
        self.ended()
        self._end.detach(self._feed)
        gate = process_gate()
        with gate.hold():
            gate.detach(self._feed)
            staged.forget(self)
            if not self._orphaned:
                self._end.leave()
            self.own_memory()
            following.discard(self)
            if all(other.model is not self.model for other in following):
                release(self.model)
        self._end.close()


def _require_whole(update: Update) -> None:
    if update.damage:
        raise WeightSyncError(update.damage)
