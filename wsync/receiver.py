"""A worker's end of a scheme: connects to the sender, waits for versions, and closes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from wsync.control.receiver_thread import without_waiting_for_versions
from wsync.deadlines import deadline_in, remaining
from wsync.errors import NotConnected, SyncTimeout, WeightSyncError
from wsync.gate import gate_model, process_gate, ungate_model
from wsync.loops import WorkerSlot
from wsync.loops.gate_lock import GateHook
from wsync.receiving import prepared_updates
from wsync.receiving.cascade import Cascade
from wsync.receiving.forking import gated_receivers
from wsync.receiving.install_policy import InstallOnArrival
from wsync.receiving.protocols import ReadsStore, ReceiveChannel
from wsync.receiving.registered import RegisteredBufferBinder
from wsync.receiving.updating import MakeInstallPolicy, ModelUpdater
from wsync.receiving.versions import no_more_weights
from wsync.types import ANY_VERSION, Ack
from wsync.weights.binding import Binding
from wsync.weights.strategy import WeightStrategy
from wsync.weights.targets import Destination

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 1.0  # seconds between two looks for a first version, in `pull`


class Receiver(ModelUpdater):
    """One model in one worker.

    Inherited: ``ModelUpdater`` takes an update from the message to the model; ``VersionState`` has the version and the
    threads that wait in ``receive`` (``_seen`` is the version that was last returned).

    Args:
        destination: what takes the weights. A module is gated from ``begin_connect`` or ``connect`` on.
        strategy: the format in which ``receive`` returns weights.
        channel, make_install_policy, cascade: see ``ModelUpdater``.
    """

    def __init__(
        self,
        destination: Destination,
        strategy: WeightStrategy,
        channel: ReceiveChannel,
        *,
        make_install_policy: MakeInstallPolicy = lambda _: InstallOnArrival(),
        cascade: Cascade | None = None,
    ) -> None:
        super().__init__(destination, channel, make_install_policy, cascade)
        self._strategy = strategy
        self._store_channel = channel if isinstance(channel, ReadsStore) else None
        # Handles messages and installs updates: this object; with the arena, a ``WorkerSlot`` that calls this object.
        self._updater: Receiver | WorkerSlot = self
        self._gate_hook: GateHook = self  # attached to the gate: the updater, or a policy that calls the updater
        # Keeps the model bound to the tensors of `register_shared_weights` (`shm/registered.py`), if there are any.
        self._buffer_binder: RegisteredBufferBinder | None = None
        self._connecting = False  # ``connect`` or ``begin_connect`` was called
        self._attached = False
        self._in_forked_child = False

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
        try:
            self._channel.connect(worker_idx, deadline_in(timeout))
            self._gate_or_refuse()
            self._install_first_weights()
            self._channel.attach(self._updater)
            self._attached = True
        except BaseException:  # also KeyboardInterrupt
            self.end(finished=False)
            self.close()
            raise

    def _gate_or_refuse(self) -> None:
        try:
            if self._channel.layout is not None:
                self._target_or_create()
            with without_waiting_for_versions():  # of other models: entering the gate may request one
                self._gate_model()
        except Exception:
            self._channel.answer(Ack(self.worker_idx, ANY_VERSION, traceback.format_exc()))
            raise

    def _install_first_weights(self) -> None:
        gate = process_gate()
        arena = self._channel.arena
        self._updater = self if arena is None else arena.updater_for(self)
        self._gate_hook = self._install_policy.gate_hook(self._updater)
        gate.attach(self._gate_hook)
        memory = None if arena is None else arena.registered_buffers()
        if memory is not None:
            self._buffer_binder = RegisteredBufferBinder(memory, self)
            gate.attach(self._buffer_binder)
        with without_waiting_for_versions():  # of other models, see `_gate_or_refuse`
            self._install_policy.install_now()
        # Without first weights, the error can only be of an update sent meanwhile. The answer to that update tells the
        # sender, so it is not raised here.
        error = self._error if self._channel.first_version else ""
        self._acknowledge_after_cascade()
        self._seen = min(self.version, self._channel.first_version)  # `receive` returns a newer one
        if error:
            raise WeightSyncError(f"worker {self.worker_idx} could not install its first weights:\n{error}")

    def _reset(self) -> None:
        """Release the previous connection: a worker that the sender has disconnected may connect again."""
        self.require_creator()
        self._connecting = True
        if not self._attached:
            return
        if not self._closed and self._channel.sender_is_alive():
            raise RuntimeError(f"worker {self.worker_idx} is connected already: connect() was called twice")
        self.close()

    def _gate_model(self) -> None:
        process_gate().call(self._gate_model_inside)

    def _gate_model_inside(self) -> None:  # in one step: ``close`` of another receiver of the model may ungate it
        if self.destination.module is not None:
            gate_model(self.destination.module)
        gated_receivers.add(self)

    # --- called by the user ---

    def weights(self) -> Any:
        """Return the weights in the strategy's format, not copied. Within the gate they are of one version.

        With ``load=`` and no model there are no weights to return: returns the version number instead.
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
        if self._store_channel is not None:  # a store has no sender that announces versions: read the newest first
            self.process(self._store_channel.fetch_newest())
        if not self._install_policy.install_newest(timeout):
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
        """Copy the model into memory of its own until the next update, so it may be written.

        Called inside the gate: by the thread in ``close`` or ``apply_weights``, or before a fork by the forking thread.

        Args:
            stay_unbound: do not bind the model to the registered buffers again before the next version.
        """
        if stay_unbound and self._buffer_binder is not None:
            self._buffer_binder.leave_until_next_version()
        if self._target is not None:
            self._target.detach()

    def end_in_forked_child(self) -> None:
        """Process and send nothing more: the connection belongs to the parent process.

        Called in the child by the fork hook in ``receiving/forking.py``, before any of the child's own code runs.
        """
        super().end_in_forked_child()
        self._in_forked_child = True

    def close(self) -> None:
        """Copy the model to memory of its own, restore its class, and close the connection.

        Called outside the gate, by the thread that shuts down, or that connects (after an error, and again). Calls of
        ``receive`` in other threads return.
        """
        self.end(finished=True)
        self._channel.detach(self._updater)
        gate = process_gate()
        with without_waiting_for_versions(), gate.hold():
            gate.detach(self._gate_hook)
            if self._buffer_binder is not None:
                gate.detach(self._buffer_binder)
                self._buffer_binder = None
            prepared_updates.forget(self)  # those of transactions that are not committed yet
            if not self._in_forked_child:
                # Entering the gate above may have installed an update, and so taken a slot of the arena. As the hook is
                # detached now, leaving the gate does not release it.
                self.leaving_gate()
            self.copy_to_own_memory()
            self._target = None
            gated_receivers.discard(self)
            module = self.destination.module
            if module is not None and all(other.destination.module is not module for other in gated_receivers):
                ungate_model(module)
        self._channel.close()
        self._attached = False
