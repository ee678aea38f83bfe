"""An object that each process has one of: a forked child makes its own, because it has none of its parent's threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def per_process(make: Callable[[], T]) -> Callable[[], T]:
    """Return a function that returns this process's object, which ``make`` makes: now, and anew in a forked child."""
    current = [make()]

    def renew() -> None:
        current[0] = make()

    os.register_at_fork(after_in_child=renew)
    return lambda: current[0]
