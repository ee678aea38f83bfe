"""The process of a training run: requests to stop, and the seed of a resumed run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import numpy as np


class StopRequest:
    """Turns the first SIGINT or SIGTERM into a request to stop; a second one has its usual effect.

    A context manager, for the main thread. In another thread (a launcher of sweeps may run jobs in threads) Python
    cannot catch signals, and `requested` stays false.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._callbacks: list[Callable[[], object]] = []
        self._handlers: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has arrived."""
        return self.signal is not None

    @property
    def exit_status(self) -> int:
        """The exit status of a process that a signal ended, 128 + its number; 0 without a signal."""
        return 0 if self.signal is None else 128 + self.signal

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback` when a signal arrives, inside the handler; at once if one has arrived."""
        if self.requested:
            callback()
        else:
            self._callbacks.append(callback)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {one: signal.signal(one, self._request) for one in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore()
        for callback in self._callbacks:
            callback()

    def _restore(self) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())


def resumed_seed(seed: int, frames: int) -> int:
    """Return the seed for a run with the setting `seed` that continues after `frames` frames; `seed` itself for 0.

    A resumed run must not repeat the initial states, noise and minibatches of the first one. The result has 31 bits.
    """
    if frames == 0:
        return seed
    return int(np.random.SeedSequence([seed, frames]).generate_state(1)[0] >> 1)
