"""A trainer's process that ends by an error has shut nothing down, and ``multiprocessing`` waits for its children.

So the ends of lines that are still open are closed first: workers that wait there hear that there will be nothing more.
"""

from __future__ import annotations

import atexit
import os
from multiprocessing import util  # noqa: F401  whose own function at exit is to be there before ours: the last is first
from weakref import WeakSet

from wsync.sending.end import SenderEnd

_open: WeakSet[SenderEnd] = WeakSet()


def close_at_exit(end: SenderEnd) -> None:
    """Close ``end`` before this process waits for its children, unless that has been done."""
    _open.add(end)


@atexit.register
def _close() -> None:
    for end in list(_open):
        end.close()


os.register_at_fork(after_in_child=_open.clear)
