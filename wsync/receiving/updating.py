"""The receive path: what a worker does with an update, the same for every backend.

    message (receiver thread) ─→ gate ─→ channel.poll_update ─→ target.install ─→ acknowledgement

Acting thread: the worker thread that runs the model's forward. Receiver thread: reads the sender's messages.

An update is installed by the one that enters the gate first: the acting thread before a forward, or the receiver thread
after it has read the message. The same thread acknowledges it, unless there is a cascade.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from wsync.errors import WeightSyncError, error_of
from wsync.gate import MixedWeightsGuard, entered_for_forward_of, process_gate
from wsync.receiving import prepared_updates
from wsync.receiving.cascade import Cascade
from wsync.receiving.events import CheckLayout, Closed, Decision, Event, Failed, Newest, Prepare
from wsync.receiving.install_policy import InstallOnArrival, InstallOnRequest
from wsync.receiving.protocols import ReceiveChannel
from wsync.receiving.versions import VersionState
from wsync.shm.registered import RegisteredView
from wsync.types import Ack, Update
from wsync.weights.binding import Binding, load_extra, unshare
from wsync.weights.layout import Layout
from wsync.weights.targets import Destination, Target, mixed_weights

_INTERRUPTED = "a signal handler has raised"
MakeInstallPolicy = Callable[[VersionState], InstallOnArrival | InstallOnRequest]


class ModelUpdater:
    """Installs what a channel delivers in one model, and answers the sender.

    A ``GateHook`` and a ``MessageHandler``. With the arena, a ``WorkerSlot`` is called in its place, and calls it for
    the updates that the fast path does not install: it is the ``SlotUpdater`` of that ``WorkerSlot``.

    Args:
        destination: what takes the weights.
        channel: the connection to the sender, and what it delivers.
        make_install_policy: makes the object that decides when updates are installed: as they arrive
            (``InstallOnArrival``), or when the worker requests them (``InstallOnRequest``).
        cascade: passes each installed update on to this worker's own workers, before it is acknowledged.

    Attributes:
        destination: as given.
        install_policy: as made.
        state: what is known about versions and the connection.
        worker_idx: the worker's index; -1 before ``connect``.
        error: the traceback of the last install; empty if it did not raise.
        version, waiting: see ``SlotUpdater``. Changed by ``state``, or by the ``WorkerSlot``.
        unbound_at_version: while the model has this version, it is not bound to registered weights.
        announced_at: see ``SlotUpdater``. Set outside the gate by the thread in ``process``, read and cleared inside.
    """

    def __init__(
        self,
        destination: Destination,
        channel: ReceiveChannel,
        make_install_policy: MakeInstallPolicy,
        cascade: Cascade | None,
    ) -> None:
        self.destination = destination
        self.worker_idx = -1
        self.version = 0
        self.waiting: set[object] = set()
        self.unbound_at_version = -1
        self.announced_at = 0.0
        self.error = ""
        self.state = VersionState(self, channel, self if destination.model is None else destination.model)
        self.install_policy = make_install_policy(self.state)
        self._channel = channel
        self._cascade = cascade
        self._target: Target | None = None
        self._layout: Layout | None = None  # of the target
        self._guard = MixedWeightsGuard(destination.model)

    # --- called inside the gate, by the thread that enters it: usually the acting or the receiver thread, but also one
    # that connects, is in ``receive`` or ``pull``, or (with both ends in one process) sends

    def poll_update(self) -> bool:
        """Install the version that the next forward must use. Implements ``wsync.loops.gate_state.GateHook``.

        Returns True if the gate has to call all hooks again: after a transaction, which has changed other models, and
        after a failed install, which may have attached a ``MixedWeightsGuard``.
        """
        update = self._channel.poll_update()
        if update is None:
            return False
        if prepared_updates.commit_if_prepared(self, update.version):
            return True
        self.install(update)
        return bool(self.error)

    def leaving_gate(self) -> None:
        """Tell the arena that the forward no longer reads its slot. Implements ``wsync.loops.gate_state.GateHook``."""
        arena = self._channel.arena
        if arena is not None:
            arena.leaving_gate()

    def install(self, update: Update) -> None:
        """Install and acknowledge the update. If that fails, the sender gets the error.

        The model is then unchanged; or its weights may be mixed (``Target.mixed``), and forwards are refused.
        """
        started = time.perf_counter()
        wait = max(0.0, started - self.announced_at) if self.announced_at else 0.0
        self.error = _INTERRUPTED
        try:
            self.error = error_of(self._install, update)
        finally:  # also after a signal handler has raised
            self._update_guard(update.version, self.error)
        self._channel.on_installed(update, self.error)
        arena, binding = self._channel.arena, self.binding
        if arena is not None and binding is not None and not (self.error or update.extra or self._cascade):
            arena.enable_fast_path(binding)
        self.announced_at = 0.0
        self.state.record(update.version, self.error)
        try:
            if self._cascade is not None and not self.error:
                self._cascade.add(update)
            elif update.acknowledge or self.error:
                apply = time.perf_counter() - started
                self._channel.answer(Ack(self.worker_idx, update.version, self.error, wait=wait, apply=apply))
        finally:  # also after a signal handler has raised
            self.state.notify()

    def _update_guard(self, version: int, error: str) -> None:
        if not error:
            self.allow_forwards()
        elif self._target is not None and self._target.mixed and not self._guard.why:
            self._guard.set(mixed_weights(f"worker {self.worker_idx}", f"version {version}"))

    def allow_forwards(self) -> None:
        """Refuse forwards no longer because of mixed weights. Called inside the gate."""
        self._guard.set("")

    def require_one_version(self) -> None:
        """See ``SlotUpdater``."""
        if self._guard.why:
            raise WeightSyncError(self._guard.why)
        if (arena := self._channel.arena) is not None:
            arena.require_one_version()

    @property
    def in_forward(self) -> bool:
        """See ``SlotUpdater``."""
        return entered_for_forward_of(self.destination.model)

    def _install(self, update: Update) -> None:
        _require_undamaged(update)
        self._target_or_create().install(update.views, load_extra(update.extra))

    def _check(self, update: Update) -> None:
        _require_undamaged(update)
        self._target_or_create().check_only(update.views, load_extra(update.extra))

    def _check_layout(self, layout: Layout) -> None:
        self.destination.target(layout, bind=self._channel.binds)

    def _target_or_create(self) -> Target:
        layout = self._channel.layout
        if self._target is None or self._layout is not layout:  # a later trainer's, through a store
            assert layout is not None, "a channel delivers no update before its layout"
            if self.destination.module is not None:
                unshare(self.destination.module)
            self._target, self._layout = self.destination.target(layout, bind=self._channel.binds), layout
            # The model keeps its slot if an install may fail, or is not done as soon as a version is published.
            arena, may_refuse = self._channel.arena, self._target.may_refuse
            if arena is not None and (may_refuse or self.install_policy.holds_between_forwards):
                arena.hold_between_forwards()
        return self._target

    @property
    def binding(self) -> Binding | None:
        """How a module takes updates; None before the first, and for other destinations."""
        return self._target if isinstance(self._target, Binding) else None

    def copy_to_own_memory(self, stay_unbound: bool = False) -> None:
        """Copy the model into memory of its own until the next update, so that it may be written.

        Called by the thread in ``apply_weights``, by the fork hook in the forking thread, or by ``ArenaReader``.
        ``stay_unbound``: do not bind the model to the registered weights again before the next version.
        """
        if stay_unbound:
            self.unbound_at_version = self.version
        if self._target is not None:
            self._target.detach()
            if (arena := self._channel.arena) is not None:
                arena.unbind()

    def is_bound_to(self, tensors: Iterable[Tensor]) -> bool:
        """See ``SlotUpdater``."""
        return self.binding is not None and self.binding.is_bound_to(tensors)

    def release(self) -> None:
        """Drop what is prepared, and copy the model to memory of its own. Called by the thread that closes."""
        prepared_updates.drop(self)
        try:
            self.copy_to_own_memory()
            self._target = None
            self.unbound_at_version = -1
        finally:
            if not self.state.in_forked_child:
                # Entering the gate has taken a slot of the arena, so the sender has not written it during the copy.
                # Leaving the gate does not release it, as the hook is detached now.
                self.leaving_gate()

    # --- called outside the gate, by the receiver thread, a thread that connects or is in ``pull``, or (with both ends
    # in one process) the thread that sends

    def require_fit(self) -> None:
        """Check that the model takes the weights of the connection's layout, if that is known yet.

        Raises:
            LayoutMismatch: it does not.
        """
        if self._channel.layout is not None:
            self._target_or_create()

    def on_readable(self) -> bool:
        """Process one message. Implements ``wsync.control.receiver_thread.MessageHandler``."""
        return self.process(self._channel.receive_event())

    def process(self, event: Event | None) -> bool:
        """Process an event, if there is one; False when there will be no more."""
        if isinstance(event, Closed):
            self.state.close(finished=event.finished)
            return False
        if event is not None:
            self.announced_at = time.perf_counter()
            process_gate().call_without_forward(self._process, event)
            self.run_cascade()
        return True

    def _process(self, event: Event) -> None:
        # ``Published`` needs no branch: entering the gate has already called ``poll_update``, which has installed it.
        if isinstance(event, Prepare):
            if error := error_of(self._check, event.update):
                self._update_guard(event.update.version, error)
            else:
                prepared_updates.keep(event.transaction, self, event.update)
            self._answer_check(event.update.version, error)
        elif isinstance(event, Decision):
            prepared_updates.decide(event.transaction, event.commit)
        elif isinstance(event, CheckLayout):
            self._answer_check(event.version, error_of(self._check_layout, event.layout))
        elif isinstance(event, Newest):
            self.install_policy.on_newest(event.version, event.request)
        elif isinstance(event, Failed):
            self.state.record(event.version, event.error)
            if not event.sender_knows:
                self._channel.answer(Ack(self.worker_idx, event.version, event.error))
            self.state.notify()
        # If the acting thread has installed this update already, this must not count in the wait of the next one.
        self.announced_at = 0.0

    def _answer_check(self, version: int, error: str) -> None:
        self._channel.answer(Ack(self.worker_idx, version, error), prepared=True)

    def run_cascade(self) -> None:
        """If this worker has workers of its own, pass an installed update on to them, and then acknowledge it."""
        ack = self._cascade.run(self.worker_idx) if self._cascade is not None else None
        if ack is not None:
            self._channel.answer(ack)


def _require_undamaged(update: Update) -> None:
    if update.damage:
        raise WeightSyncError(update.damage)


class RegisteredBinder:
    """Binds the model of ``updater`` to the registered weights, ``memory``, while these have the model's version.

    A ``GateHook`` (``wsync/loops/gate_state.py``): called inside the gate, after the hook that installs updates.
    """

    def __init__(self, memory: RegisteredView, updater: ModelUpdater) -> None:
        self._memory = memory
        self._updater = updater

    def poll_update(self) -> bool:
        """See ``GateHook``. The buffers may have been changed in place, so autocast's casts of them are dropped."""
        updater = self._updater
        version, binding = updater.version, updater.binding
        wanted = version == self._memory.version and version != updater.unbound_at_version
        if version and wanted and binding is not None:
            binding.rebind(self._memory.tensors)
            torch.clear_autocast_cache()
        return False

    def leaving_gate(self) -> None:
        """See ``GateHook``."""
