"""A worker's end of a scheme: connects to the sender, waits for versions, and closes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from wsync.deadlines import deadline_in, remaining
from wsync.errors import SyncTimeout, WeightSyncError
from wsync.gate import process_gate, without_forward
from wsync.loops import WorkerSlot
from wsync.loops.gate_state import GateHook
from wsync.receiving import gated_models
from wsync.receiving.cascade import Cascade
from wsync.receiving.install_policy import InstallOnArrival
from wsync.receiving.protocols import ReadsStore, ReceiveChannel
from wsync.receiving.updating import MakeInstallPolicy, ModelUpdater, RegisteredBinder
from wsync.receiving.versions import Phase
from wsync.types import ANY_VERSION, Ack
from wsync.weights.strategy import WeightStrategy
from wsync.weights.targets import Destination

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 1.0  # seconds between two requests for a first version, in `pull`


class Receiver:
    """The receiving end of one model in one worker.

    Its parts: ``updater`` processes the messages and installs updates in the model; ``updater.state`` stores the
    installed version, and wakes the threads that wait in ``receive``. ``channel`` is the connection to the sender.

    Threads: the user's threads call all methods. One exception: after ``begin_connect`` (older API,
    ``receiving/joining.py``) the receiver thread calls ``connect`` and, after an error, ``close``. Gate:
    ``weights`` is called inside it, the other methods outside; properties are read anywhere.

    Args:
        destination: what takes the weights: a module, a mapping of tensors, or ``load``. A module is gated from
            ``begin_connect`` or ``connect`` on.
        strategy: the format in which ``receive`` returns weights.
        channel: the connection to the sender.
        make_install_policy: makes the object that decides when updates are installed.
        cascade: passes updates on to this worker's own workers; None if it has none.

    Attributes:
        destination: as given.
        updater: see above.
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
        self.destination = destination
        self.updater = ModelUpdater(destination, channel, make_install_policy, cascade)
        self._state = self.updater.state
        self._strategy = strategy
        self._channel = channel
        self._store_channel = channel if isinstance(channel, ReadsStore) else None
        # Handles messages and installs updates: with the arena a ``WorkerSlot`` (the worker's part in the arena), which
        # calls the updater; otherwise the updater itself.
        self._handler: ModelUpdater | WorkerSlot = self.updater
        # The hooks that are attached to the gate: that of the install policy and, if there are registered weights
        # (``shm/registered.py``), a ``RegisteredBinder``.
        self._hooks: list[GateHook] = []

    # --- connect and close ---

    def begin_connect(self, worker_idx: int, timeout: float | None) -> Sequence[int]:
        """Begin ``connect`` without waiting for the sender.

        The model is gated from here on: ``connect`` runs in the receiver thread while another thread uses the model.

        Returns:
            File descriptors to poll; one at least is readable once the sender has answered, or has gone.

        Raises:
            NotConnected: there is no sender.
            SyncTimeout: no connection within ``timeout`` seconds: the sender's queue of connection attempts is full, or
                its machine does not answer.
            RuntimeError: this worker is connected already.
        """
        self._reset()
        descriptors = self._channel.begin_connect(worker_idx, deadline_in(timeout))
        self._state.begin()
        try:
            self._gate_model()
        except BaseException:
            self._state.close(finished=False)  # Phase.LOST; the close() below would set Phase.FINISHED
            self.close()
            raise
        return descriptors

    def connect(self, worker_idx: int, timeout: float | None) -> None:
        """Connect to the sender, and install the first weights if the sender has any yet.

        Raises:
            NotConnected: there is no sender, or it rejected this worker.
            SyncTimeout: it did not answer within ``timeout`` seconds.
            LayoutMismatch: its weights do not fit the model.
            RuntimeError: this worker is connected already; the existing connection is kept. Or it was called inside the
                gate, where nothing can be installed.
            WeightSyncError: the model raised an error as it took the first weights; has the traceback. This error and a
                ``LayoutMismatch`` are also sent to the sender, as the worker's answer.
        """
        if process_gate().held_here:
            raise RuntimeError("call connect() outside any forward and any wsync.gate() block")
        self._reset()
        self.updater.worker_idx = worker_idx
        self._state.begin()
        try:
            self._channel.connect(worker_idx, deadline_in(timeout))
            self._gate_or_report_error()
            self._attach_hooks_and_install()
            self._state.set_open()
            self._channel.attach(self._handler)
        except BaseException:  # also KeyboardInterrupt
            self._state.close(finished=False)
            self.close()
            raise

    def _gate_or_report_error(self) -> None:
        """Gate the model, or send the sender the error."""
        try:
            self.updater.require_fit()
            self._gate_model()
        except Exception:
            # ANY_VERSION is above all versions: the error is an answer to any version for which the sender waits.
            self._channel.answer(Ack(self.updater.worker_idx, ANY_VERSION, traceback.format_exc()))
            raise

    def _gate_model(self) -> None:
        process_gate().call_without_forward(gated_models.add, self.updater)

    def _attach_hooks_and_install(self) -> None:
        arena_reader, policy = self._channel.arena, self.updater.install_policy
        self._handler = self.updater if arena_reader is None else arena_reader.handler_for(self.updater)
        self._hooks = [policy.gate_hook(self._handler)]
        registered = None if arena_reader is None else arena_reader.registered_weights()
        if registered is not None:
            self._hooks.append(RegisteredBinder(registered, self.updater))
        for hook in self._hooks:
            process_gate().attach(hook)
        # A thread that waits in `receive` already (older API) must not return the first weights.
        self._state.last_returned = self._channel.first_version
        policy.install_now()
        # `install_now` installs the newest version. If the sender had no first weights, that version is from a `send`
        # that ran while this worker connected. That `send` raises the error in the trainer; `connect` does not.
        error = self.updater.error if self._channel.first_version else ""
        self.updater.run_cascade()
        if error:
            raise WeightSyncError(f"worker {self.worker_idx} could not install its first weights:\n{error}")

    def _reset(self) -> None:
        """Release the previous connection: a worker that the sender has disconnected may connect again."""
        self._state.require_not_forked()
        if self._state.phase is Phase.OPEN and not self._channel.sender_has_ended():
            raise RuntimeError(f"worker {self.worker_idx} is connected already: connect() was called twice")
        if self._state.phase not in (Phase.NEW, Phase.CONNECTING):
            self.close()

    def close(self) -> None:
        """Copy the model to its own memory, ungate it if no other receiver has it, close the connection. Idempotent.

        Called at shutdown; in ``connect`` after an error, or before a worker connects again. Calls of ``receive`` in
        other threads return.
        """
        self._state.close(finished=True)
        self._channel.detach(self._handler)
        gate = process_gate()
        with without_forward(), gate.hold():
            for hook in self._hooks:
                gate.detach(hook)
            self._hooks = []
            self.updater.install_policy.release()
            self.updater.release()
            gated_models.remove(self.updater)
        self._channel.close()

    # --- versions ---

    @property
    def worker_idx(self) -> int:
        """The worker's index; -1 before ``connect``."""
        return self.updater.worker_idx

    @property
    def version(self) -> int:
        """The version that the model has."""
        return self._state.version

    @property
    def connected(self) -> bool:
        """Whether it is connected to a sender that has not ended, as far as is known here."""
        return self._state.phase is Phase.OPEN

    @property
    def finished(self) -> bool:
        """Whether there will be no more versions because the sender or this worker has shut down."""
        return self._state.phase is Phase.FINISHED

    def weights(self) -> Any:
        """Return the weights in the strategy's format, not copied. Within the gate they are of one version.

        With ``load=`` and no model there are no weights to return: returns the version number instead.
        """
        model = self.destination.model
        return self.version if model is None else self._strategy.extract_weights(model)

    def receive(self, timeout: float | None, take: Callable[[], Any] | None = None) -> Any | None:
        """Wait for the next version; return what ``take()`` (default: ``weights``), called inside the gate, returns.

        See ``VersionState.wait_next``.
        """
        return self._state.wait_next(timeout, take or self.weights)

    def pull(self, timeout: float | None) -> int:
        """Install the newest version; return its number.

        With ``initiator="receiver"`` that is the newest of the sender (or store), otherwise the newest that has
        arrived. If there is no version yet, wait for the first. See ``WeightSyncScheme.pull``.

        Raises:
            NotConnected: the connection has ended, and the newest version was returned already, or there is none.
            SyncTimeout: there is no version yet, or the sender did not send it in time.
            WeightSyncError: the newest version could not be installed, or ``send_weights`` has raised in the trainer;
                or a store cannot be read.
            RuntimeError: called inside the gate.
        """
        self._state.require_begun()
        if process_gate().held_here:
            raise RuntimeError("call pull() outside any forward and any wsync.gate() block")
        deadline, pause = deadline_in(timeout), _FIRST_PAUSE
        self._install_newest(timeout)
        while not self._state.newest_settled_version:
            left = remaining(deadline)
            if left == 0.0:
                raise SyncTimeout(f"worker {self.worker_idx}: there is no version yet")
            if not self._state.wait_first(pause if left is None else min(pause, left)):
                if self._state.closed:
                    raise self._state.ended()
                self._install_newest(remaining(deadline))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return process_gate().call_without_forward(self._mark_returned)

    def _mark_returned(self) -> int:
        """Return the installed version, after which ``receive`` waits for the next; or raise why a newer one failed."""
        state = self._state
        if state.newest_has_failed:
            raise WeightSyncError(
                f"worker {self.worker_idx}: version {state.failed_version} could not be installed and is not tried "
                f"again. Newest installed version: {state.version or 'none'}. The error:\n{state.failure}"
            )
        if state.phase is Phase.LOST and state.version <= state.last_returned:
            raise state.ended()
        return state.mark_returned()

    def _install_newest(self, timeout: float | None) -> None:
        """Install the newest version that there is now; called by the thread in ``pull``.

        Raises:
            NotConnected: this end was shut down while a store was read.
            SyncTimeout: the sender has one, and did not send it in time.
            WeightSyncError: see ``pull``.
        """
        # A store has no sender that announces versions: read the newest first, in this thread. If the store is watched,
        # the receiver thread reads it too. The channel has a lock, and both install inside the gate.
        if self._store_channel is not None:
            self.updater.process(self._store_channel.fetch_newest())
            if self._state.closed:  # another thread has called shutdown(): drop what was read
                raise self._state.ended()
        if not self.updater.install_policy.install_newest(timeout):
            raise SyncTimeout(f"worker {self.worker_idx}: the newest version did not come before the deadline")
