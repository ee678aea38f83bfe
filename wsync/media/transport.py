"""The medium of a user's backend: the calls of a ``TransportBackend``, each end in a thread of its own.

    trainer   Offer ─→ send_weights ─→ Sent ─┐
    worker    receive_weights ←─ Offer       ├─→ receive_weights again, if the first call has not returned the update

``wsync/transport.py`` says what the calls promise, and may do.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from wsync.control.loop import run_blocking
from wsync.control.session import Medium, checksum_of
from wsync.control.wire import MAX_TEXT, Link, Offer, Sent, Side
from wsync.deadlines import deadline_in, remaining
from wsync.errors import WeightSyncError
from wsync.transport import Closable, TransportBackend
from wsync.weights.packing import Buffer
from wsync.weights.snapshot import Snapshot, snapshot
from wsync.weights.strategy import WeightStrategy

_log = logging.getLogger(__name__)
_GRACE = 0.5  # seconds in which the death of a worker is noticed after its transport has failed
_PATIENCE = 2.0  # seconds for calls to end after ``close``
_SHARE = 0.8  # of the timeout: a worker's own error then reaches the trainer before that gives up
_formatted: WeakKeyDictionary[Buffer, Any] = WeakKeyDictionary()  # one object for the transports of all workers


class _Calls:
    """A thread that makes blocking calls, one at a time. Used by the control thread.

    Args:
        name: of the thread, after ``wsync-``. It starts with the first call.
    """

    def __init__(self, name: str) -> None:
        self._name = f"wsync-{name}"
        self._queue = queue.SimpleQueue[Any]()
        self._thread: threading.Thread | None = None
        self._pending: set[asyncio.Future[Any]] = set()

    @property
    def busy(self) -> bool:
        """Whether a call has not returned."""
        return bool(self._pending)

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> asyncio.Future[Any]:
        """Call a function in the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        self._queue.put((loop, future, lambda: function(*args, **options)))
        return future

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            loop, future, call = item
            result, error = None, None
            try:
                result = call()
            except BaseException as raised:  # noqa: BLE001  raised where the call is awaited
                error = raised
                if not isinstance(raised, Exception) or isinstance(raised, StopIteration):  # these end an event loop
                    error = RuntimeError(f"{type(raised).__name__}: {raised}")
            with suppress(RuntimeError):  # the loop has ended: nothing awaits the result
                loop.call_soon_threadsafe(_settle, future, result, error)
            del item, future, call, result, error  # not kept until the next call: a buffer may be in them

    def end(self, cause: Exception) -> None:
        """End the wait for calls, and the thread after the running one."""
        for future in [*self._pending]:
            _settle(future, None, cause)
        self._queue.put(None)

    def join(self, timeout: float) -> None:
        """Wait for the end of the thread."""
        if self._thread is not None:
            self._thread.join(timeout)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
        future.exception()  # seen: the call of an update that has failed is not always awaited


class TransportMedium(Medium):
    """One end of a connection whose weights a ``TransportBackend`` carries.

    Args:
        create: returns one end of the transport. Called in the thread of the set-up, before that.
        strategy: the format of weights that the transport is given.
        worker: the worker's index.
        timeout: of the scheme, in seconds; None for no limit.
    """

    def __init__(
        self, create: Callable[[], TransportBackend], strategy: WeightStrategy, worker: int, timeout: float | None
    ) -> None:
        self._create = create
        self._made: TransportBackend | None = None
        self._strategy = strategy
        self._worker = worker
        self._timeout = timeout
        self._setup, self._calls = _Calls("transport-setup"), _Calls("transfer")
        self._is_set_up = False
        self._closed, self._news = asyncio.Event(), asyncio.Event()
        self._closing: asyncio.Task[None] | None = None
        self._sent = Sent(0)  # the newest such message; ``_news`` is set when it comes
        self._running: asyncio.Future[Any] | None = None  # a call of ``receive_weights`` that was not used yet

    @property
    def waits_for_close(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether a method of the transport has not returned."""
        return self._setup.busy or self._calls.busy

    # --- the trainer's end ---

    async def send(self, link: Link, offer: Offer, payload: Buffer | bytes) -> None:
        """Announce the update, call ``send_weights``, and say that it has returned. Differences go inline."""
        if isinstance(payload, bytes):
            await super().send(link, offer, payload)
            return
        await link.send(replace(offer, medium=True))
        await self._set_up(link, lambda made: made.setup_connection_and_weights_on_sender())
        if payload not in _formatted:
            _formatted[payload] = self._formatted(payload)
        try:
            await self._calls.call(self._send, payload, _formatted[payload])
        except ConnectionError:
            raise
        except Exception as error:  # a user's transport raises anything; raised again
            with suppress(TimeoutError):
                async with asyncio.timeout(_GRACE):
                    await self._closed.wait()
                    raise ConnectionError(f"the worker has gone; its transport raised {error!r}") from error
            await link.send(Sent(offer.version, _text(error)))
            raise
        await link.send(Sent(offer.version))

    def _send(self, _buffer: Buffer, weights: Any) -> None:
        """Call ``send_weights``. The buffer is kept meanwhile: the call may go on after the connection has ended."""
        self._transport.send_weights(weights)

    # --- the worker's end ---

    async def receive(self, link: Link, offer: Offer, into: Buffer) -> None:
        """Call ``receive_weights`` until it has returned the weights with the checksum of the offer."""
        options = {"worker_idx": self._worker, "strategy": self._strategy}
        await self._set_up(link, lambda made: made.setup_connection_and_weights_on_receiver(**options))
        deadline = deadline_in(None if self._timeout is None else _SHARE * self._timeout)
        own, older = self._formatted(into), 0
        while True:
            after = self._sent.version >= offer.version  # whether ``send_weights`` had returned before this call
            if self._running is None:
                self._running = self._calls.call(self._receive, into, own, remaining(deadline))
            try:
                received = await self._next(offer)
            except Exception as error:  # as above; raised again unless a further call can succeed
                if isinstance(error, ConnectionError) and after and not self._closed.is_set():
                    raise WeightSyncError(f"receive_weights raised {error!r}") from error  # the connection goes on
                if after or self._closed.is_set() or self._sent.error:
                    raise
                received = None
            if received is not None:
                if received is not own:
                    given = snapshot(received)  # extra state came with the offer
                    into.pack(into.layout.order(Snapshot(given.tensors, optional=given.optional)))
                found = checksum_of(into.memory, offer.extra)
                if not offer.checksum or found == offer.checksum:
                    return
                if found == older and after:
                    raise WeightSyncError(
                        self._complaint("weights with another checksum: corrupt, or of another version")
                    )
                older = found if after else 0
                into.flat.zero_()  # also between the tensors, where nothing else writes
            elif after:
                raise WeightSyncError(self._complaint("None, although send_weights had returned"))
            if remaining(deadline) == 0.0:
                raise WeightSyncError(self._complaint("only older weights until the deadline"))
            while self._sent.version < offer.version:
                self._require_open()
                self._news.clear()
                await self._news.wait()

    def _receive(self, _buffer: Buffer, weights: Any, timeout: float | None) -> Any:
        """Call ``receive_weights``; the buffer is kept meanwhile."""
        return self._transport.receive_weights(timeout, weights=weights, strategy=self._strategy)

    async def _next(self, offer: Offer) -> Any:
        """Return what the running call returns; raises if the sender says that it could not send."""
        assert self._running is not None
        while not self._running.done():
            if self._sent.version == offer.version and self._sent.error:
                raise WeightSyncError(f"the sender could not send it: {self._sent.error}")
            self._news.clear()
            news = asyncio.ensure_future(self._news.wait())
            await asyncio.wait([self._running, news], return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
        running, self._running = self._running, None
        return running.result()

    def _require_open(self) -> None:
        if self._closed.is_set():
            raise ConnectionError("the connection has ended")

    def _complaint(self, what: str) -> str:
        return f"{type(self._transport).__name__}.receive_weights returned {what}"

    # --- both ---

    def _formatted(self, buffer: Buffer) -> Any:
        return self._strategy.extract_weights(dict(zip(buffer.layout.names, buffer.views, strict=True)))

    @property
    def _transport(self) -> TransportBackend:
        assert self._made is not None, "it has been set up"
        return self._made

    async def _set_up(self, link: Link, set_up: Callable[[TransportBackend], Any]) -> None:
        """Make the transport and set this end up, unless that has been done.

        An error ends the connection; the other end is told it first.
        """
        self._require_open()
        if self._is_set_up:
            return
        try:
            await self._setup.call(self._make_and_set_up, set_up)
            self._is_set_up = True
        except Exception as error:
            text = f"the set-up of the transport of worker {self._worker} has failed: {_text(error)}"
            await link.send(Side(text.encode(errors="replace")))
            asyncio.get_running_loop().call_soon(link.close, ConnectionError(text))
            raise

    def _make_and_set_up(self, set_up: Callable[[TransportBackend], Any]) -> None:
        self._made = self._create()
        if self._closed.is_set():  # meanwhile: nobody else closes it
            self._close_transport()
        set_up(self._made)

    def on_side(self, data: bytes) -> None:
        """The other end could not be set up: end the connection."""
        raise ConnectionError(data.decode(errors="replace"))

    def on_sent(self, version: int, error: str) -> None:
        """``send_weights`` has returned, or has failed."""
        self._sent = Sent(version, error)
        self._news.set()

    def close(self) -> None:
        """End this end; the transport's own ``close`` is called by a thread."""
        if self._closing is None:
            cause = ConnectionError("the connection has ended")
            self._closed.set()
            self._news.set()
            self._setup.end(cause)
            self._calls.end(cause)
            self._closing = asyncio.get_running_loop().create_task(run_blocking("transport-close", self._release))

    def _release(self) -> None:
        self._close_transport()
        for calls in (self._setup, self._calls):
            calls.join(_PATIENCE)

    def _close_transport(self) -> None:
        try:
            if isinstance(self._made, Closable):
                self._made.close()
        except Exception:  # noqa: BLE001  of a user's transport: other connections have to end all the same
            _log.exception("%s.close() raised an error, which has no other effect", type(self._made).__name__)

    async def wait_closed(self) -> None:
        """Return when ``close`` of the transport has returned, and the running calls, or two seconds later."""
        while self._closing is not None and not self._closing.done():
            with suppress(asyncio.CancelledError):  # a shutdown meanwhile waits, too
                await asyncio.wait([self._closing])


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-MAX_TEXT:]
