"""The senders of this process, and what becomes of them in a forked child."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class ForkedSender(Protocol):
    """A sender that its process may copy by a fork."""

    def end_in_forked_child(self) -> None:
        """Refuse every later call but ``close``. Called once, in the forked child, before any of its code runs."""
        ...


senders: WeakSet[ForkedSender] = WeakSet()
"""Those of this process."""


def _after_in_child() -> None:
    for sender in senders:
        sender.end_in_forked_child()


os.register_at_fork(after_in_child=_after_in_child)
