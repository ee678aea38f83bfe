"""The receive path: what a worker does with an update, the same for every backend.

    message (receiver thread) ─→ gate ─→ channel.poll_update ─→ binding.install ─→ acknowledgement

Acting thread: the worker thread that runs the model's forward. Receiver thread: reads the sender's messages (with RPC:
the thread of the incoming call).

An update is installed by the one that enters the gate first: the acting thread before a forward, or the receiver thread
after it has read the message. The same thread acknowledges it, unless there is a cascade.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from wsync.control.receiver_thread import without_waiting
from wsync.deadlines import deadline_in, remaining
from wsync.errors import NotConnected, SyncTimeout, WeightSyncError
from wsync.gate import gate_model, process_gate, ungate_model
from wsync.loops.gate_lock import Feed
from wsync.receiving import prepared
from wsync.receiving.events import CheckLayout, Closed, Decision, Event, Failed, Newest, Prepare
from wsync.receiving.forking import gated_receivers
from wsync.receiving.on_request import OnRequest
from wsync.receiving.protocols import Poller, ReceiveChannel
from wsync.receiving.registered import RegisteredFollower
from wsync.receiving.versions import VersionState, no_more_weights
from wsync.types import ANY_VERSION, Ack, Update
from wsync.weights.binding import Binding, load_extra, unshare
from wsync.weights.strategy import WeightStrategy
from wsync.weights.targets import Destination, Target

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 1.0  # seconds between two looks for a first version, in `pull`


class Receiver(VersionState):
    """One model in one worker.

    Inherited from ``VersionState``: ``version``, ``waiting``, ``wait_next``, and ``_seen``, the version that was last
    returned by ``receive``.

    Args:
        destination: what takes the weights. A module is gated from ``begin_connect`` or ``connect`` on.
        strategy: the format in which ``receive`` returns weights.
        channel: the connection to the sender, and what it delivers.
        cascade: passes the update on to this worker's own workers. Called outside the gate after each installed update,
            before it is acknowledged.
    """

    def __init__(
        self,
        destination: Destination,
        strategy: WeightStrategy,
        channel: ReceiveChannel,
        *,
        cascade: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(channel)
        self._on_request: OnRequest | None = None
        self.destination = destination
        self.worker_idx = -1
        self.announced_at = 0.0
        self._strategy = strategy
        # Registered twice: with the gate (polled before each forward) and with the receiver thread (called per
        # message). A channel may substitute a compiled one.
        self._poller: Poller = self
        self._feed: Feed = self  # what the gate polls: the poller, or what stands before it
        self._cascade = cascade
        self._unacknowledged: Update | None = None  # installed; acknowledged after the cascade
        self._target: Target | None = None
        self._follower: RegisteredFollower | None = None
        self._connecting = False  # ``connect`` or ``begin_connect`` was called
        self._attached = False
        self._in_forked_child = False
        self._error = ""

    def fetch_on_request(self, max_staleness: int | None, timeout: float | None) -> None:
        """From the next ``connect`` on, install versions only when they are asked for: see ``OnRequest``."""
        self._on_request = OnRequest(self._channel, self, max_staleness, timeout)

    def begin_connect(self, worker_idx: int, timeout: float | None) -> Sequence[int]:
        """Begin ``connect`` without waiting for the sender.

        The model is gated from here on: the receiver thread may call ``connect`` (``BackgroundConnect``) while another
        thread uses the model.

        Returns:
            File descriptors to poll; when any is readable, ``connect`` will not block.

        Raises:
            NotConnected: there is no sender.
            SyncTimeout: the sender's queue of connection attempts stayed full for ``timeout`` seconds.
        """
        self._reset()
        descriptors = self._channel.begin_connect(worker_idx, deadline_in(timeout))
        self._gate_model()
        return descriptors

    def connect(self, worker_idx: int, timeout: float | None) -> None:
        """Connect to the sender, and install the first weights if the sender has any yet.

        Raises:
            NotConnected: there is no sender, or it refused this worker.
            SyncTimeout: it did not answer within ``timeout`` seconds.
            LayoutMismatch: its weights do not fit the model.
            RuntimeError: this worker is connected already, and stays so.
            Exception: whatever else the model raised. The sender gets every such error too.
        """
        self._reset()
        self.worker_idx = worker_idx
        self.reopen()
        self._channel.connect(worker_idx, deadline_in(timeout))
        try:
            if self._channel.layout is not None:
                self._target_or_create()
            with without_waiting():
                self._gate_model()
        except Exception:
            self._channel.answer(Ack(worker_idx, ANY_VERSION, traceback.format_exc()))
            self._channel.close()
            raise
        gate = process_gate()
        self._poller = self._channel.poller(self)
        self._feed = self._poller if self._on_request is None else self._on_request.over(self._poller)
        gate.attach(self._feed)
        memory = self._channel.registered()
        if memory is not None:
            self._follower = RegisteredFollower(memory, self)
            gate.attach(self._follower)
        with without_waiting():
            gate.gate_lock.pass_through()  # installs the first weights, if there are any
            if self._on_request is not None:
                gate.call(self._on_request.install)
        error = self._error if self._channel.first_version else ""  # without a first version: of a later update
        self._acknowledge_after_cascade()
        self._seen = min(self.version, self._channel.first_version)  # `receive` returns a newer one
        try:
            self._channel.attach(self._poller)
        except NotConnected:  # the sender went meanwhile
            self.close()
            raise
        self._attached = True
        if error:
            self.close()
            raise WeightSyncError(f"worker {worker_idx} could not install its first weights:\n{error}")

    def _reset(self) -> None:
        """Release the previous connection: a worker that the sender has disconnected may connect again."""
        self.require_creator()
        self._connecting = True
        if not self._attached:
            return
        if not self._closed and self._channel.sender_is_alive():
            raise RuntimeError(f"worker {self.worker_idx} is connected already: connect() was called twice")
        self.close()
        self._attached, self._target = False, None

    def _gate_model(self) -> None:
        if self.destination.module is not None:
            gate_model(self.destination.module)
        process_gate().call(gated_receivers.add, self)  # only the holder of the gate may use the set

    def _target_or_create(self) -> Target:
        if self._target is None:
            layout = self._channel.layout
            if layout is None:
                raise NotConnected("an update arrived before its layout")
            if self.destination.module is not None:
                unshare(self.destination.module)
            self._target = self.destination.target(layout, bind=self._channel.binds)
            if (
                self._target.may_refuse or self._on_request is not None
            ):  # keep the previous version's slot so that a failed install can roll back
                self._channel.hold_previous()
        return self._target

    # --- called inside the gate, by the thread that enters it from outside: acting or receiver thread mostly ---

    def poll_update(self) -> bool:
        """Install the version that the next forward must use. Implements ``wsync.loops.gate_lock.Feed``.

        Returns True if it committed a transaction: other models have changed too, and the gate polls all feeds again.
        """
        update = self._channel.poll_update()
        if update is None:
            return False
        if prepared.commit_if_prepared(self, update.version):
            return True
        self.install(update)
        return False

    def forward_ended(self) -> None:
        """Release what the forward used. Implements ``wsync.loops.gate_lock.Feed``."""
        self._channel.forward_ended()

    def install(self, update: Update) -> None:
        """Install and acknowledge the update. If that fails, the model is unchanged and the sender gets the error."""
        started = time.perf_counter()
        wait = started - self.announced_at if self.announced_at else 0.0
        self._error = ""
        try:
            _require_undamaged(update)
            self._target_or_create().install(update.views, load_extra(update.extra))
        except Exception:  # noqa: BLE001  the trainer raises the model's error; the forward here must continue
            self._error = traceback.format_exc()
        self._channel.on_installed(update, self._error)
        if isinstance(self._target, Binding) and not (self._error or update.extra or self._cascade):
            self._channel.enable_fast_path(self._target)
        self.announced_at = 0.0
        if self._on_request is not None:
            self._on_request.on_tried(update.version)
        if not self._error:
            self.set_version(update.version)
            if self._cascade is not None:
                self._unacknowledged = update
                return
        if update.acknowledge or self._error:
            apply = time.perf_counter() - started
            self._channel.answer(Ack(self.worker_idx, update.version, self._error, wait=wait, apply=apply))

    # --- called outside the gate: by the receiver thread, a thread in ``pull``, or (in one process) the sender ---

    def on_readable(self) -> bool:
        """Process one message. Implements ``wsync.control.receiver_thread.MessageHandler``."""
        return self.process(self._channel.receive_events())

    def process(self, events: Sequence[Event]) -> bool:
        """Process events, outside the gate. Implements ``wsync.receiving.protocols.UpdateReceiver``."""
        for event in events:
            if isinstance(event, Closed):
                self.end(finished=event.finished)
                return False
            self.announced_at = time.perf_counter()
            process_gate().call(self._process, event)
            self._acknowledge_after_cascade()
        return True

    def end(self, *, finished: bool) -> None:
        """See ``VersionState``; also ends the wait of threads in ``pull`` and before a forward."""
        super().end(finished=finished)
        if self._on_request is not None:
            self._on_request.on_closed()

    def _process(self, event: Event) -> None:
        # ``Published`` needs no branch: entering the gate has already polled the feed and installed the update.
        if isinstance(event, Prepare):
            self._prepare(event)
        elif isinstance(event, Decision):
            prepared.decide(event.transaction, event.commit)
        elif isinstance(event, CheckLayout):
            self._check_layout(event)
        elif isinstance(event, Newest) and self._on_request is not None:
            self._on_request.on_newest(event.version, event.request)
        elif isinstance(event, Failed):
            if self._on_request is not None:
                self._on_request.on_tried(event.version)
            self._channel.answer(Ack(self.worker_idx, event.version, event.error))
        # Clear it: if the acting thread already installed this update, this timestamp must not count in the next
        # update's wait.
        self.announced_at = 0.0

    def _prepare(self, event: Prepare) -> None:
        error = ""
        try:
            _require_undamaged(event.update)
            self._target_or_create().check_only(event.update.views, load_extra(event.update.extra))
            prepared.keep(event.transaction, self, event.update)
        except Exception:  # noqa: BLE001  the error is this worker's answer to the sender
            error = traceback.format_exc()
        self._channel.answer(Ack(self.worker_idx, event.update.version, error), prepared=True)

    def _check_layout(self, event: CheckLayout) -> None:
        error = ""
        try:
            self.destination.target(event.layout, bind=self._channel.binds)  # checks the layout
        except Exception:  # noqa: BLE001  the error is this worker's answer to the sender
            error = traceback.format_exc()
        self._channel.answer(Ack(self.worker_idx, event.version, error), prepared=True)

    def _acknowledge_after_cascade(self) -> None:
        """Pass the installed update on to this worker's own workers, then acknowledge it.

        Called outside the gate, by the thread that processes messages or connects: also when the acting thread
        installed the update, because the message about it still arrives.
        """
        if self._cascade is None:
            return
        update = process_gate().call(self._take_unacknowledged)
        if update is None:
            return
        error = ""
        try:
            self._cascade()
        except Exception:  # noqa: BLE001  the trainer raises it: this worker's own workers lack the update
            error = traceback.format_exc()
        if update.acknowledge or error:
            self._channel.answer(Ack(self.worker_idx, update.version, error))

    def _take_unacknowledged(self) -> Update | None:
        update, self._unacknowledged = self._unacknowledged, None
        return update

    # --- called by the user ---

    def weights(self) -> Any:
        """Return the weights in the strategy's format, not copied. Within the gate they are of one version.

        Where a function has loaded them and there is no model: the version.
        """
        model = self.destination.model
        return self.version if model is None else self._strategy.extract_weights(model)

    def pull(self, timeout: float | None) -> int:
        """Install the newest version that can be had now; waits ``timeout`` seconds for it, or for the first one.

        Raises:
            NotConnected: the sender is gone, and there has been no version.
            SyncTimeout: there is no version yet, or the sender did not send it in time.
            RuntimeError: called inside the gate.
        """
        self._require_connecting()
        if process_gate().held_here:
            raise RuntimeError("call pull() outside any forward and any wsync.gate() block")
        deadline, pause = deadline_in(timeout), _FIRST_PAUSE
        self._fetch(timeout)
        while not self.version:
            left = remaining(deadline)
            if left == 0.0:
                raise SyncTimeout(f"worker {self.worker_idx}: there is no version yet")
            if self.wait_next(pause if left is None else min(pause, left), lambda: True) is None:
                if self.finished:
                    raise no_more_weights(finished=True)
                self._fetch(remaining(deadline))
            pause = min(2 * pause, _LONGEST_PAUSE)
        self._seen = self.version
        return self.version

    def _fetch(self, timeout: float | None) -> None:
        """Install the newest version that there is now.

        Raises:
            SyncTimeout: the sender has one, and did not send it in time.
        """
        self.process(self._channel.fetch_newest())
        if self._on_request is None:
            process_gate().gate_lock.pass_through()
        elif not self._on_request.pull(timeout):
            raise SyncTimeout(f"worker {self.worker_idx}: the newest version did not come within {timeout} s")

    def receive(self, timeout: float | None, take: Callable[[], Any] | None = None) -> Any | None:
        """Wait for the next version; return what ``take()`` returns (by default ``weights``): see ``wait_next``."""
        self._require_connecting()
        return self.wait_next(timeout, take or self.weights)

    def _require_connecting(self) -> None:
        """Check that ``connect`` or ``begin_connect`` was called here: without it no version would ever arrive.

        Raises:
            NotConnected: neither was; or this is a forked child of the process that did.
        """
        self.require_creator()
        if not self._connecting:
            raise NotConnected("not connected yet: call connect(worker_idx=…) before receive() and pull()")

    @property
    def binding(self) -> Binding | None:
        """How a module takes updates; None before the first, and for other destinations."""
        return self._target if isinstance(self._target, Binding) else None

    @property
    def connected(self) -> bool:
        """Whether it is connected to a sender that has not ended, as far as is known here."""
        return self._attached and not self._closed

    def copy_to_own_memory(self, stay_unbound: bool = False) -> None:
        """Copy the model into memory of its own until the next update, so it may be written. Called inside the gate.

        Args:
            stay_unbound: do not bind the model to registered buffers again before the next version.
        """
        if stay_unbound and self._follower is not None:
            self._follower.leave_until_next_version()
        if self._target is not None:
            self._target.detach()

    def end_in_forked_child(self) -> None:
        """Process and send nothing more: the connection belongs to the parent process."""
        super().end_in_forked_child()
        self._in_forked_child = True

    def close(self) -> None:
        """Copy the model to memory of its own, restore its class, and close the connection.

        ``receive`` returns in other threads.
        """
        self.end(finished=True)
        self._channel.detach(self._poller)
        gate = process_gate()
        with without_waiting(), gate.hold():  # not for a version of another model, which may not come
            gate.detach(self._feed)
            if self._follower is not None:
                gate.detach(self._follower)
                self._follower = None
            prepared.forget(self)
            if not self._in_forked_child:
                self._channel.forward_ended()
            self.copy_to_own_memory()
            gated_receivers.discard(self)
            module = self.destination.module
            if module is not None and all(other.destination.module is not module for other in gated_receivers):
                ungate_model(module)
        self._channel.close()


def _require_undamaged(update: Update) -> None:
    if update.damage:
        raise WeightSyncError(update.damage)
