"""A trainer's process that ends by an error has shut nothing down, and ``multiprocessing`` waits for its children.

So the ends of lines that are still open are closed first: workers that wait there hear that there will be nothing more.
It is one of multiprocessing's own finalizers that does it: nothing else is run before that wait in every process, be it
the main one or one that multiprocessing has started; and a forked child inherits none.
"""

from __future__ import annotations

from multiprocessing import util
from weakref import ref

from wsync.sending.end import SenderEnd


def close_at_exit(end: SenderEnd) -> None:
    """Close ``end`` before this process waits for its children, unless that has been done."""
    util.Finalize(end, _close, args=(ref(end),), exitpriority=0)


def _close(reference: ref[SenderEnd]) -> None:
    end = reference()
    if end is not None:
        end.close()
