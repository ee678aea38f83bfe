"""Every wait has a deadline: a moment on ``time.monotonic``'s clock, or ``None`` for no limit."""

from __future__ import annotations

import math
import select
import time
from collections.abc import Iterable

NOW = 0.0
"""A deadline that is over: look, and do not wait."""
_LONGEST = float(2**31 - 1)  # milliseconds that ``poll`` takes: 24 days are as good as any later deadline


def remaining(deadline: float | None) -> float | None:
    """Seconds until ``deadline``, not below 0; ``None`` for no deadline."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def milliseconds(deadline: float | None) -> float | None:
    """Whole milliseconds until ``deadline``, rounded up, as far as ``poll`` takes them; ``None`` for no deadline."""
    left = remaining(deadline)
    return None if left is None else min(-(-left * 1000 // 1), _LONGEST)


def deadline_in(timeout: float | None) -> float | None:
    """The moment ``timeout`` seconds from now; ``None`` for none (and for infinitely many)."""
    return None if timeout is None or timeout == math.inf else time.monotonic() + timeout


def wait_readable(descriptors: Iterable[int], deadline: float | None) -> list[int]:
    """Those of ``descriptors`` that are readable (or closed), as soon as one is; empty at the deadline."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poller.poll(milliseconds(deadline))]
