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

from wsync.control.loop import BlockingCalls
from wsync.control.session import Medium
from wsync.control.wire import Changes

T = TypeVar("T")
_PATIENCE = 2.0  # seconds for calls to end after ``close``


class BlockingMedium(Medium):
    """A medium that makes calls that block, one after the other, in a thread of its own."""

    checks = True

    def __init__(self) -> None:
        self._ended = False  # ``close`` was called
        self._transfers, self._closing = BlockingCalls("transfer"), BlockingCalls("medium-close")
        self._running: set[asyncio.Future[Any]] = set()
        self._changes = Changes()  # of calls that return, and the end

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function. ``close`` ends the wait; the function may go on, and keeps its arguments."""
        self._require_open()
        work = self._start(self._transfers, function, *args)
        await self._until(work.done)
        return work.result()

    def _start(self, thread: BlockingCalls, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        work = thread.start(function, *args)
        self._running.add(work)
        work.add_done_callback(self._returned)
        return work

    def _returned(self, work: asyncio.Future[Any]) -> None:
        work.exception()  # it counts as retrieved: the call may have been given up
        self._running.discard(work)
        self._changes.tell()

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready()``; ConnectionError: ``close`` came first."""
        await self._changes.until(lambda: self._ended or ready())
        self._require_open()

    def _require_open(self) -> None:
        if self._ended:
            raise ConnectionError("the connection has ended")

    def _release(self) -> None:
        """End what runs in the other thread; called once, by a thread."""

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            self._start(self._closing, self._release)
            self._closing.end()
            self._transfers.end()
            self._changes.tell()

    async def wait_closed(self) -> None:
        """Return when all calls have ended, or two seconds later."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _PATIENCE
        while self._running and loop.time() < deadline:
            with suppress(asyncio.CancelledError):  # a shutdown meanwhile waits, too
                await asyncio.wait(self._running, timeout=deadline - loop.time())
        if not self._running:
            self._closing.join()
            self._transfers.join()
