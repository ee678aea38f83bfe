"""The receive path: what a worker does with an update, the same for every backend.

    message (receiver thread) ─→ gate ─→ channel.poll_update ─→ target.install ─→ acknowledgement

Acting thread: the worker thread that runs the model's forward. Receiver thread: reads the sender's messages (with RPC:
the thread of the incoming call).

An update is installed by the one that enters the gate first: the acting thread before a forward, or the receiver thread
after it has read the message. The same thread acknowledges it, unless there is a cascade.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from wsync.errors import NotConnected, WeightSyncError, error_of
from wsync.gate import process_gate
from wsync.receiving import prepared_updates
from wsync.receiving.cascade import Cascade
from wsync.receiving.events import CheckLayout, Closed, Decision, Event, Failed, Newest, Prepare
from wsync.receiving.install_policy import InstallOnArrival, InstallOnRequest
from wsync.receiving.protocols import ReceiveChannel
from wsync.receiving.versions import VersionState
from wsync.types import Ack, Update
from wsync.weights.binding import Binding, load_extra, unshare
from wsync.weights.layout import Layout
from wsync.weights.targets import Destination, Target

MakeInstallPolicy = Callable[[VersionState], InstallOnArrival | InstallOnRequest]


class ModelUpdater(VersionState):
    """Installs what a channel delivers in one model, and answers the sender. The base of ``Receiver``.

    Args:
        destination: what takes the weights.
        channel: the connection to the sender, and what it delivers.
        make_install_policy: makes the object that decides when updates are installed: as they arrive
            (``InstallOnArrival``), or when the worker asks for them (``InstallOnRequest``).
        cascade: passes each installed update on to this worker's own workers, before it is acknowledged.

    Attributes:
        destination: as given.
        worker_idx: the worker's index; -1 before ``connect``.
        announced_at: see ``wsync.loops.worker_slot.SlotReceiver``.
    """

    def __init__(
        self,
        destination: Destination,
        channel: ReceiveChannel,
        make_install_policy: MakeInstallPolicy,
        cascade: Cascade | None,
    ) -> None:
        super().__init__(channel)
        self.destination = destination
        self.worker_idx = -1
        self.announced_at = 0.0
        self._install_policy = make_install_policy(self)
        self._target: Target | None = None  # made for the layout of the connection
        self._cascade = cascade
        self._error = ""  # of the last install

    # --- called inside the gate, by the thread that enters it from outside: acting or receiver thread mostly ---

    def poll_update(self) -> bool:
        """Install the version that the next forward must use. Implements ``wsync.loops.gate_lock.GateHook``.

        Returns True if it committed a transaction: other models have changed too, and the gate calls all hooks again.
        """
        update = self._channel.poll_update()
        if update is None:
            return False
        if prepared_updates.commit_if_prepared(self, update.version):
            return True
        self.install(update)
        return False

    def leaving_gate(self) -> None:
        """Release what the forward used. Implements ``wsync.loops.gate_lock.GateHook``."""
        arena = self._channel.arena
        if arena is not None:
            arena.leaving_gate()

    def install(self, update: Update) -> None:
        """Install and acknowledge the update. If that fails, the model is unchanged and the sender gets the error."""
        started = time.perf_counter()
        wait = started - self.announced_at if self.announced_at else 0.0
        self._error = error_of(self._install, update)
        self._channel.on_installed(update, self._error)
        arena, target = self._channel.arena, self._target
        if arena is not None and isinstance(target, Binding) and not (self._error or update.extra or self._cascade):
            arena.enable_fast_path(target)
        self.announced_at = 0.0
        if self._error:
            self._refused(update.version)
        else:
            self.set_version(update.version)
            self._install_policy.wake()
            if self._cascade is not None:
                self._cascade.add(update)
                return
        if update.acknowledge or self._error:
            apply = time.perf_counter() - started
            self._channel.answer(Ack(self.worker_idx, update.version, self._error, wait=wait, apply=apply))

    def _install(self, update: Update) -> None:
        _require_undamaged(update)
        self._target_or_create().install(update.views, load_extra(update.extra))

    def _check(self, update: Update) -> None:
        _require_undamaged(update)
        self._target_or_create().check_only(update.views, load_extra(update.extra))

    def _check_layout(self, layout: Layout) -> None:
        self.destination.target(layout, bind=self._channel.binds)

    def _target_or_create(self) -> Target:
        if self._target is None:
            layout = self._channel.layout
            if layout is None:
                raise NotConnected("an update arrived before its layout")
            if self.destination.module is not None:
                unshare(self.destination.module)
            self._target = self.destination.target(layout, bind=self._channel.binds)
            # with the previous version's slot, a failed install can roll back
            if self._channel.arena is not None and (self._target.may_refuse or self._install_policy.keeps_previous):
                self._channel.arena.hold_previous()
        return self._target

    # --- called outside the gate: by the receiver thread, a thread in ``pull``, or (in one process) the sender ---

    def on_readable(self) -> bool:
        """Process one message. Implements ``wsync.control.receiver_thread.MessageHandler``."""
        return self.process(self._channel.receive_event())

    def process(self, event: Event | None) -> bool:
        """Process an event, if there is one, outside the gate; False when there will be no more."""
        if isinstance(event, Closed):
            self.end(finished=event.finished)
            return False
        if event is not None:
            self.announced_at = time.perf_counter()
            process_gate().call(self._process, event)
            self._acknowledge_after_cascade()
        return True

    def end(self, *, finished: bool) -> None:
        """See ``VersionState``; also ends the wait of threads in ``pull`` and before a forward."""
        super().end(finished=finished)
        self._install_policy.wake()

    def _process(self, event: Event) -> None:
        # ``Published`` needs no branch: entering the gate has already called ``poll_update``, which has installed it.
        if isinstance(event, Prepare):
            self._prepare(event)
        elif isinstance(event, Decision):
            prepared_updates.decide(event.transaction, event.commit)
        elif isinstance(event, CheckLayout):
            self._answer_check(event.version, error_of(self._check_layout, event.layout))
        elif isinstance(event, Newest):
            self._install_policy.on_newest(event.version, event.request)
        elif isinstance(event, Failed):
            self._refused(event.version)
            self._channel.answer(Ack(self.worker_idx, event.version, event.error))
        # Clear it: if the acting thread already installed this update, this timestamp must not count in the next
        # update's wait.
        self.announced_at = 0.0

    def _prepare(self, event: Prepare) -> None:
        error = error_of(self._check, event.update)
        if not error:
            prepared_updates.keep(event.transaction, self, event.update)
        self._answer_check(event.update.version, error)

    def _answer_check(self, version: int, error: str) -> None:
        self._channel.answer(Ack(self.worker_idx, version, error), prepared=True)

    def _refused(self, version: int) -> None:
        self.refused = max(self.refused, version)
        self._install_policy.wake()

    def _acknowledge_after_cascade(self) -> None:
        ack = self._cascade.run(self.worker_idx) if self._cascade is not None else None
        if ack is not None:
            self._channel.answer(ack)


def _require_undamaged(update: Update) -> None:
    if update.damage:
        raise WeightSyncError(update.damage)
