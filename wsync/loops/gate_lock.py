"""The lock around every forward of a synchronised model, and the feeds that are polled on the way in."""

from __future__ import annotations

from typing import Any, Protocol


class Feed(Protocol):
    """The source of one model's updates, as the gate uses it."""

    def poll_update(self) -> bool:
        """Install the newest version before a forward.

        Called by the thread that enters the gate from outside, with the lock held: by the acting thread before each
        forward, by the receiver thread after a message. Returns True if that also decided about other feeds' models,
        which then are polled again. What it raises reaches the caller of the forward.
        """
        ...

    def forward_ended(self) -> None:
        """Release what the forward used. Called when the gate is left to the outside, also if nothing was entered."""
        ...


class GateLock:
    """A re-entrant lock, its holder's depth inside, and the feeds to poll on the way in from outside.

    Args:
        lock: a ``threading.RLock``.

    Attributes:
        lock: as given.
        depth: how often its holder has entered; 0 outside.
        feeds: a tuple; replaced as a whole, by a thread that has the lock.
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
            # A decision found by one feed switches the models of others, which have to be polled again.
            while any([feed.poll_update() for feed in self.feeds]):
                pass

    def leave(self, depth: int, /) -> None:
        """Tell the feeds that the forward has ended, if ``depth`` is outside. The caller has set ``depth`` back."""
        self.depth = depth
        if depth == 0:
            for feed in self.feeds:
                feed.forward_ended()
