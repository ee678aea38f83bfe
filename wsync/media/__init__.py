"""Media: how the bytes of one connection's updates travel. One medium is one file, and has both ends in it.

``wsync.control.session`` has their protocol. ``offer.medium`` says how an update travels: false, its bytes follow the
``Offer`` on the connection itself, and the session reads them before the next message; true, the medium carries them,
beside the session, which goes on reading the connection and tells the medium what concerns it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from wsync.control.loop import run_blocking
from wsync.control.session import Medium

T = TypeVar("T")
_PATIENCE = 2.0  # seconds for calls to end after ``close``


class BlockingMedium(Medium):
    """A medium that makes calls that block, each in a thread of its own."""

    checks = True

    def __init__(self) -> None:
        self._closed = asyncio.Event()
        self._running: set[asyncio.Future[Any]] = set()

    async def _call(self, name: str, function: Callable[..., T], *args: Any) -> T:
        """Call a function in a thread. ``close`` ends the wait; the function may go on, and keeps its arguments."""
        work, closed = self._start(name, function, *args), asyncio.ensure_future(self._closed.wait())
        await asyncio.wait([work, closed], return_when=asyncio.FIRST_COMPLETED)
        closed.cancel()
        self._require_open()
        return work.result()

    def _start(self, name: str, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        def ended(work: asyncio.Future[T]) -> None:
            self._running.discard(work)
            if not work.cancelled():
                work.exception()  # it is seen, also where nobody waits any more

        work = asyncio.ensure_future(run_blocking(name, function, *args))
        self._running.add(work)
        work.add_done_callback(ended)
        return work

    def _require_open(self) -> None:
        if self._closed.is_set():
            raise ConnectionError("the connection has ended")

    def _release(self) -> None:
        """End what runs in other threads; called once, by a thread."""

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._start("medium-close", self._release)

    async def wait_closed(self) -> None:
        """Return when all calls have ended, or two seconds later."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _PATIENCE
        while self._running and loop.time() < deadline:
            with suppress(asyncio.CancelledError):  # a shutdown meanwhile waits, too
                await asyncio.wait(self._running, timeout=deadline - loop.time())
