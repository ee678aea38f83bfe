"""The policies for when a model's updates are installed.

``InstallOnArrival`` installs them as they arrive, ``InstallOnRequest`` when the worker requests them
(``initiator="receiver"``).
"""

from __future__ import annotations

import threading
from functools import partial

from wsync.errors import SyncTimeout, WeightSyncError
from wsync.gate import process_gate
from wsync.loops.gate_state import GateHook
from wsync.receiving.protocols import RequestChannel
from wsync.receiving.versions import VersionState


class InstallOnArrival:
    """Installs updates as they arrive, by the thread that enters the gate first.

    The thread that connects calls ``gate_hook`` and ``install_now``, a thread in ``pull`` calls ``install_newest``.

    Attributes:
        holds_between_forwards: whether the model's slot is kept between forwards, although installing cannot fail.
    """

    holds_between_forwards = False

    def gate_hook(self, updater: GateHook) -> GateHook:
        """Return the hook to attach to the gate; ``updater`` installs the updates. Called outside the gate."""
        return updater

    def release(self) -> None:
        """Install nothing from now on: another thread may be in ``install_newest``. Called inside the gate."""

    def install_now(self) -> None:
        """Install the version that has arrived, if any. Called outside the gate."""
        process_gate().call_without_forward(bool)

    def install_newest(self, timeout: float | None) -> bool:
        """Install the newest version; False if it did not come in time. Called outside the gate."""
        self.install_now()
        return True

    def on_newest(self, version: int, request: int) -> None:
        """Record the newest version, which the sender has named in answer to a request.

        Called inside the gate, by the receiver thread.
        """


class InstallOnRequest:
    """Installs updates in ``install_newest``, and before a forward if the model is over ``max_staleness`` behind.

    It is the ``GateHook`` of the model, and calls the hook that installs updates when one is to be installed. Versions
    in the arena or in a watched store can be installed at once. Any other version is requested from the sender, and the
    thread waits until the receiver thread has installed it. While a forward waits it leaves the gate, because the
    receiver thread needs it; afterwards the gate calls all hooks again. Nothing is requested for a forward of another
    model.

    Attributes are read and written inside the gate, or outside it with ``gate_state.lock`` held. For the methods that
    ``InstallOnArrival`` has too, see there.

    Args:
        channel: the connection to the sender.
        state: has the version of the model, and whether the connection has ended; it reports each change.
        max_staleness: how many versions the model may be behind when a forward starts; None for no limit.
        timeout: seconds that a forward waits for a version; None for no limit.
    """

    holds_between_forwards = True

    def __init__(
        self, channel: RequestChannel, state: VersionState, max_staleness: int | None, timeout: float | None
    ) -> None:
        self._channel = channel
        self._state = state
        state.on_change = self._wake
        self._max_staleness = max_staleness
        self._timeout = timeout
        self._updater: GateHook | None = None
        self._gate_state = process_gate().gate_state
        self._changed = threading.Condition(self._gate_state.lock)
        self._waiting = 0  # threads that wait for a version: updates are installed as they come
        self._unfinished = False  # a signal handler has raised in an install: the next forward installs again
        self._requests: dict[int, int | None] = {}  # that threads wait for: the version named in answer; None before

    def gate_hook(self, updater: GateHook) -> GateHook:
        """See ``InstallOnArrival``: this object."""
        self._updater = updater
        return self

    def release(self) -> None:
        """See ``InstallOnArrival``."""
        self._updater = None

    # --- called by the gate ---

    def poll_update(self) -> bool:
        """See ``GateHook``.

        Raises:
            SyncTimeout: a version that the forward needs did not come in time.
            WeightSyncError: it could not be installed, or its transport has failed.
        """
        if self._updater is None or not (self._waiting or self._unfinished or self._is_too_old()):
            return False
        again = self._install_next(self._updater)
        if again or not self._is_too_old() or not self._state.in_forward:
            return again
        if self._channel.newest_version <= self._state.failed_version:
            raise WeightSyncError(f"version {self._state.failed_version} was not installed, and {self._behind()}")
        return self._fetch_before_forward()

    def leaving_gate(self) -> None:
        """See ``GateHook``."""
        if self._updater is not None:
            self._updater.leaving_gate()

    def _is_too_old(self) -> bool:
        if self._max_staleness is None or self._state.closed:
            return False
        return self._channel.newest_version - self._state.version > self._max_staleness

    def _fetch_before_forward(self) -> bool:
        request = self._channel.request_newest()
        if not request:
            return False
        gate_state = self._gate_state
        subject, gate_state.subject = gate_state.subject, None
        gate_state.depth = 0  # so that a thread that enters while this one waits calls the hooks
        try:
            arrived = self._await(request, self._timeout)
        finally:
            gate_state.depth, gate_state.subject = 1, subject
        if not arrived:
            newest = self._channel.newest_version
            raise SyncTimeout(f"version {newest} did not come within {self._timeout} s, and {self._behind()}")
        return True

    def _behind(self) -> str:
        return f"the model has version {self._state.version}: more than max_staleness={self._max_staleness} behind"

    # --- called outside the gate ---

    def install_newest(self, timeout: float | None) -> bool:
        """See ``InstallOnArrival``."""
        with self._gate_state.lock:
            request = self._channel.request_newest()
            arrived = not request or self._await(request, timeout)
        self.install_now()
        return arrived

    def install_now(self) -> None:
        """See ``InstallOnArrival``."""
        process_gate().call_without_forward(self._install)

    def _install(self) -> None:
        self._waiting += 1
        try:
            while self._updater is not None and self._install_next(self._updater):
                pass
        finally:
            self._waiting -= 1

    def _install_next(self, updater: GateHook) -> bool:
        self._unfinished = True
        again = updater.poll_update()
        self._unfinished = False
        return again

    # --- waiting, with ``gate_state.lock`` held, which is released meanwhile ---

    def _await(self, request: int, timeout: float | None) -> bool:
        """Wait until a request is answered and its version installed, or the sender is gone; False at the timeout."""
        self._waiting += 1
        try:
            self._requests[request] = None
            return self._changed.wait_for(partial(self._has_come, request), timeout)
        finally:
            self._requests.pop(request, None)
            self._waiting -= 1

    def _has_come(self, request: int) -> bool:
        version = self._requests[request]
        return self._state.closed or (version is not None and self._state.newest_settled_version >= version)

    def on_newest(self, version: int, request: int) -> None:
        """See ``InstallOnArrival``. ``request`` is 0 where the sender announces a version that it has just queued."""
        for number, answer in self._requests.items():
            if answer is None and number <= request:
                self._requests[number] = version
        if not request and not all(map(self._has_come, self._requests)):
            self._channel.request_newest()  # again: a signal handler in the trainer may have raised in the first one
        self._wake()

    def _wake(self) -> None:
        """Wake the waiting threads. Called by any thread, inside the gate or outside: waits for a running forward."""
        with self._gate_state.lock:
            self._changed.notify_all()
