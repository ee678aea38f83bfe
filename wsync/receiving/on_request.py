"""Workers that fetch (``initiator="receiver"``): what stands between the gate and the object that installs updates.

Versions are installed by ``pull``; and before a forward, if the model is more than ``max_staleness`` versions behind.
Where versions lie in the arena, or in a store that is watched, they are there already. Others are requested from the
sender: a thread then waits until the receiver thread has installed the version. A forward that waits has left the gate
meanwhile, because the receiver thread needs it; afterwards the gate polls all feeds again. A thread that must not wait
(``without_waiting``) leaves the model as it is.
"""

from __future__ import annotations

import threading

from wsync.control.receiver_thread import must_not_wait
from wsync.errors import SyncTimeout
from wsync.gate import process_gate
from wsync.loops.gate_lock import Feed
from wsync.receiving.protocols import ReceiveChannel
from wsync.receiving.versions import VersionState


class OnRequest:
    """Lets updates through to a model when they were asked for. A ``Feed``, which the gate polls.

    Attributes other than constants are read and written inside the gate, or with its bare lock.

    Args:
        channel: the connection to the sender.
        state: has the version of the model, and whether the sender has gone.
        max_staleness: how many versions the model may be behind when a forward starts; None for no limit.
        timeout: seconds that a forward waits for a version; None for no limit.
    """

    def __init__(
        self, channel: ReceiveChannel, state: VersionState, max_staleness: int | None, timeout: float | None
    ) -> None:
        self._channel = channel
        self._state = state
        self._max_staleness = max_staleness
        self._timeout = timeout
        self._poller: Feed | None = None
        self._gate_lock = process_gate().gate_lock
        self._changed = threading.Condition(self._gate_lock.lock)
        self._waiting = 0  # threads that wait for a version: updates are installed as they come
        self._answered = (0, 0)  # the newest request that the sender has answered, and the version that it named
        self._tried = 0  # the newest version that was installed, or could not be

    def over(self, poller: Feed) -> OnRequest:
        """Return this object, for the updates of ``poller``. Called by ``connect``."""
        self._poller, self._gate_lock = poller, process_gate().gate_lock
        self._changed = threading.Condition(self._gate_lock.lock)
        self._answered, self._tried = (0, 0), 0
        return self

    # --- called by the gate ---

    def poll_update(self) -> bool:
        """See ``Feed``. Raises SyncTimeout if a version that the forward needs did not come in time."""
        if self._poller is None or not (self._waiting or self._is_too_old()):
            return False
        again = self._poller.poll_update()
        if again or self._waiting or must_not_wait() or not self._is_too_old():
            return again
        return self._fetch_before_forward()

    def forward_ended(self) -> None:
        """See ``Feed``."""
        if self._poller is not None:
            self._poller.forward_ended()

    def _is_too_old(self) -> bool:
        if self._max_staleness is None or self._state.closed:
            return False
        return self._channel.newest_version() - max(self._state.version, self._tried) > self._max_staleness

    def _fetch_before_forward(self) -> bool:
        number = self._channel.request_newest()
        if not number:
            return False
        self._gate_lock.depth = 0  # as outside: another thread that enters meanwhile polls the feeds
        try:
            arrived = self._await(number, self._timeout)
        finally:
            self._gate_lock.depth = 1
        if not arrived:
            raise SyncTimeout(
                f"version {self._channel.newest_version()} did not come within {self._timeout} s, and the model has "
                f"version {self._state.version}: more than max_staleness={self._max_staleness} behind"
            )
        return True

    # --- waiting ---

    def pull(self, timeout: float | None) -> bool:
        """Install the newest version; False if it did not come in time. Called outside the gate."""
        with self._gate_lock.lock:
            number = self._channel.request_newest()
            arrived = not number or self._await(number, timeout)
        process_gate().call(self.install)
        return arrived

    def install(self) -> None:
        """Install what is there. Called inside the gate."""
        self._waiting += 1
        try:
            while self._poller is not None and self._poller.poll_update():
                pass
        finally:
            self._waiting -= 1

    def _await(self, number: int, timeout: float | None) -> bool:
        """Wait until a request is answered and its version installed. Called with the gate's bare lock."""
        self._waiting += 1
        try:
            return self._changed.wait_for(lambda: self._has_come(number), timeout)
        finally:
            self._waiting -= 1

    def _has_come(self, number: int) -> bool:
        answered, version = self._answered
        return self._state.closed or (answered >= number and max(self._state.version, self._tried) >= version)

    # --- called by the receiver ---

    def on_newest(self, version: int, number: int) -> None:
        """The sender has named its newest version, in answer to request ``number``. Called inside the gate."""
        self._answered = max(self._answered, (number, version))
        self._changed.notify_all()

    def on_tried(self, version: int) -> None:
        """A version was installed, or could not be. Called inside the gate."""
        self._tried = max(self._tried, version)
        self._changed.notify_all()

    def on_closed(self) -> None:
        """Nothing more will come: an end has gone. Called outside the gate."""
        with self._gate_lock.lock:
            self._changed.notify_all()
