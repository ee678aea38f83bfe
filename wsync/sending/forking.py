"""The senders and channels of this process, and what becomes of them in a forked child."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class ForkAware(Protocol):
    """A sender or channel, which a fork copies into the child."""

    def end_in_forked_child(self) -> None:
        """Make every later call raise, except ``close``; replace locks: the thread that holds one is not in the child.

        Called once, in the forked child, before any of the child's own code runs.
        """
        ...


fork_aware: WeakSet[ForkAware] = WeakSet()
"""Those of this process."""


def _after_in_child() -> None:
    for one in fork_aware:
        one.end_in_forked_child()


os.register_at_fork(after_in_child=_after_in_child)
