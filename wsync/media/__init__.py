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

from wsync.control.loop import BlockingCalls, run_blocking
from wsync.control.session import Medium

T = TypeVar("T")
_PATIENCE = 2.0  # seconds for calls to end after ``close``


class BlockingMedium(Medium):
    """A medium that makes calls that block, each in a thread of its own."""

    checks = True

    def __init__(self) -> None:
        self._closed = asyncio.Event()
        self._running: set[asyncio.Future[Any]] = set()
        self._waits: set[asyncio.Future[None]] = set()
        self._transfers = BlockingCalls("transfer")

    async def _call(self, name: str, function: Callable[..., T], *args: Any) -> T:
        """Call a function in a thread. ``close`` ends the wait; the function may go on, and keeps its arguments."""
        work, result = self._start(name, function, *args), asyncio.get_running_loop().create_future()
        work.add_done_callback(lambda _: result.done() or result.set_result(None))
        self._waits.add(result)
        try:
            await result
        finally:
            self._waits.discard(result)
        self._require_open()
        return work.result()

    def _start(self, name: str, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        def ended(work: asyncio.Future[T]) -> None:
            self._running.discard(work)
            if not work.cancelled():
                work.exception()  # mark it as retrieved: the call may have been given up

        if name == "transfer":  # one after the other, for each update: a thread that is there already
            work = self._transfers.start(function, *args)
        else:
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
            for result in self._waits:
                if not result.done():
                    result.set_result(None)
            self._start("medium-close", self._release)
            self._transfers.end()

    async def wait_closed(self) -> None:
        """Return when all calls have ended, or two seconds later."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _PATIENCE
        while self._running and loop.time() < deadline:
            with suppress(asyncio.CancelledError):  # a shutdown meanwhile waits, too
                await asyncio.wait(self._running, timeout=deadline - loop.time())
        if not self._running:
            self._transfers.join()
