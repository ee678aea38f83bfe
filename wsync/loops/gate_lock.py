"""The lock around every forward of a synchronised model, and the feeds that are polled on the way in."""

from __future__ import annotations

from typing import Any, Protocol


class Feed(Protocol):
    """The object that installs one model's updates: a ``Receiver`` or a ``WorkerSlot``."""

    def poll_update(self) -> bool:
        """Install the newest version before a forward.

        Called each time a thread enters the gate from outside, with the lock held: by the acting thread before each
        forward, by the receiver thread after a message. Returns True if that also committed updates of other models:
        all feeds are then polled again. An exception is raised in the caller of the forward.
        """
        ...

    def forward_ended(self) -> None:
        """Release what the forward used. Called when a thread leaves the gate, also if ``poll_update`` has raised."""
        ...


class GateLock:
    """The gate's lock and feeds. One per process; used by every thread that runs a forward, and the receiver thread.

    Args:
        lock: a ``threading.RLock``.

    Attributes:
        lock: as given.
        depth: how often the thread that has the lock has entered; 0 if no thread is inside.
        feeds: polled in this order; the tuple is replaced as a whole, by a thread that has the lock.
    """

    def __init__(self, lock: Any, /) -> None:
        # `with lock` is atomic towards signals; the depth is restored, not counted down. So the gate opens again
        # whatever a forward raised, and wherever a KeyboardInterrupt came.
        self.lock = lock
        self.depth = 0
        self.feeds: tuple[Feed, ...] = ()

    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Return ``function(*args, **kwargs)``, called inside the gate."""
        with self.lock:
            depth = self.depth
            try:
                self.enter(depth)
                return function(*args, **kwargs)
            finally:
                self.depth = depth  # not in a function: a signal handler may run where a Python function begins
                self.leave(depth)

    def pass_through(self) -> None:
        """Enter and leave: a waiting update is installed on the way."""
        self.call(bool)

    def enter(self, depth: int, /) -> None:
        """Enter with the lock held, from ``depth``. The caller sets ``depth`` back and calls ``leave`` in any case."""
        self.depth = depth + 1
        if depth == 0:
            # A commit that one feed finds changes the models of others, so all feeds are polled again.
            while any([feed.poll_update() for feed in self.feeds]):
                pass

    def leave(self, depth: int, /) -> None:
        """Call ``forward_ended`` of all feeds if ``depth`` is 0. The caller has set ``depth`` back."""
        self.depth = depth
        if depth == 0:
            for feed in self.feeds:
                feed.forward_ended()
