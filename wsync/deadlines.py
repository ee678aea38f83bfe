"""Deadlines: moments on ``time.monotonic``'s clock, or None for no limit."""

from __future__ import annotations

import select
import time
from collections.abc import Iterable
from datetime import timedelta

NOW = 0.0
"""A deadline that has passed: look, and do not wait."""
_MAX_MILLISECONDS = float(2**31 - 1)  # of ``poll``
_LONGEST = 10.0**9  # seconds, some thirty years: longer timeouts are none


def as_timeout(seconds: float | None) -> float | None:
    """Return a timeout in seconds; None for None, and for more than thirty years, such as infinity."""
    return None if seconds is None or seconds > _LONGEST else seconds


def deadline_in(timeout: float | None) -> float | None:
    """Return the moment ``timeout`` seconds from now; None where ``as_timeout`` is."""
    timeout = as_timeout(timeout)
    return None if timeout is None else time.monotonic() + timeout


def remaining(deadline: float | None) -> float | None:
    """Return the seconds until ``deadline``, not below 0; None for no deadline."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def earlier(*deadlines: float | None) -> float | None:
    """Return the earliest of these deadlines."""
    return min((one for one in deadlines if one is not None), default=None)


def time_until(deadline: float | None) -> timedelta:
    """Return the time until ``deadline`` for ``torch.distributed``: a year for None, and never 0, which is no limit."""
    left = remaining(deadline)
    return timedelta(days=365) if left is None else timedelta(seconds=max(left, 0.001))


def readable(descriptors: Iterable[int], deadline: float | None, event: int = select.POLLIN) -> bool:
    """Wait until one of the descriptors is readable or closed; return False at the deadline (``time.monotonic``)."""
    poller, left = select.poll(), remaining(deadline)
    for descriptor in descriptors:
        poller.register(descriptor, event)
    return bool(poller.poll(None if left is None else min(-(-left * 1000 // 1), _MAX_MILLISECONDS)))
