"""A training run is stopped between two batches, never in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self


class StopRequest:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a request; the second one acts as it always does.

    SIGHUP comes when a terminal is closed, or a connection is lost; who has said ``nohup`` is left alone.

    A context manager, for the main thread. Elsewhere (a sweep's launcher may run jobs in threads) signals cannot be
    caught, and it only ever says that nobody asked.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._told: list[Callable[[], object]] = []
        self._before: dict[signal.Signals, object] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal came."""
        return self.signal is not None

    @property
    def exit_status(self) -> int:
        """What a shell expects of a process that ended because of the signal: 128 + its number; 0 without one."""
        return 0 if self.signal is None else 128 + self.signal

    def tell(self, somebody: Callable[[], object]) -> None:
        """Call `somebody` when a signal comes, inside its handler; at once, if one has come."""
        self._told.append(somebody)
        if self.requested:
            somebody()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore()
        for somebody in self._told:
            somebody()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]  (whatever signal.signal gave us)
        self._before = {}
