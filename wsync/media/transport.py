"""The medium of a user's backend: the calls of a ``TransportBackend``, each in a thread.

    trainer   Offer ─→ send_weights ─→ Side ─┐
    worker    receive_weights ←─ Offer       └─→ receive_weights again, unless the first call has returned the update

``wsync/transport.py`` says what the calls promise, and may do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from wsync.control.session import checksum_of
from wsync.control.wire import Link, Offer, Side
from wsync.deadlines import deadline_in, remaining
from wsync.errors import WeightSyncError, as_text
from wsync.media import BlockingMedium
from wsync.transport import TransportBackend, require_transport
from wsync.weights.layout import Buffer
from wsync.weights.snapshot import snapshot
from wsync.weights.strategy import WeightStrategy

_log = logging.getLogger(__name__)
_GRACE = 0.5  # seconds in which the death of a worker is noticed after its transport has failed
_SHARE = 0.8  # of the timeout: a worker's own error then reaches the trainer before that gives up


class TransportMedium(BlockingMedium):
    """One end of a connection whose weights a ``TransportBackend`` carries.

    ``scheme`` makes the transport, in the thread of the set-up, and has the format of its weights and the timeout.
    """

    def __init__(self, scheme: Any, worker: int) -> None:
        super().__init__()
        self._scheme, self._worker = scheme, worker
        self._strategy: WeightStrategy = scheme.strategy
        self._timeout: float | None = scheme.timeout
        self._transport: Any = None  # a ``TransportBackend``, once it is made
        self._is_set_up = False
        self._sent = Side()  # of which version ``send_weights`` has returned last, or why it has failed
        self._receiving: asyncio.Future[Any] | None = None  # a call of ``receive_weights`` that was not used yet

    @property
    def waits_for_close(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return bool(self._running)

    # --- the trainer's end ---

    async def send(self, link: Link, offer: Offer, payload: Buffer | bytes) -> None:
        """Announce the update, call ``send_weights``, and say that it has returned. Differences go inline."""
        if isinstance(payload, bytes):
            await super().send(link, offer, payload)
            return
        await link.send(replace(offer, medium=True))
        await self._set_up(link, lambda made: made.setup_connection_and_weights_on_sender())
        try:
            if payload.formatted is None:
                payload.formatted = self._formatted(payload)
            # The buffer is kept meanwhile: the call may go on after the connection has ended.
            await self._call(lambda: self._transport.send_weights(payload.formatted))
        except ConnectionError:
            raise
        except Exception as error:  # a user's transport raises anything; raised again
            with suppress(TimeoutError):
                async with asyncio.timeout(_GRACE):
                    await self._changes.until(lambda: self._ended)
            if self._ended:
                raise ConnectionError(f"the worker has gone; its transport raised {error!r}") from error
            await link.send(Side(offer.version, as_text(error)))
            raise
        await link.send(Side(offer.version))

    # --- the worker's end ---

    async def receive(self, link: Link, offer: Offer, into: Buffer) -> None:
        options = {"worker_idx": self._worker, "strategy": self._strategy}
        await self._set_up(link, lambda made: made.setup_connection_and_weights_on_receiver(**options))
        deadline = deadline_in(None if self._timeout is None else _SHARE * self._timeout)
        own, last = self._formatted(into), 0
        while True:
            final = self._receiving is None and self._has_returned(offer)  # the update can be received by this call
            received = await self._received(offer, into, own, deadline, final)
            found = 0
            if received is not None:
                if received is not own:
                    given = snapshot(received)  # extra state came with the offer
                    into.pack(into.layout.order(given._replace(extra=None)))
                found = checksum_of(into.memory, offer.extra)
                if found == offer.checksum or not offer.checksum:
                    return
                into.flat.zero_()  # also between the tensors, where nothing else writes
            if final and found in (0, last):  # None, or the same as the last time
                what = "weights with another checksum: corrupt, or of another version" if found else "None"
                raise WeightSyncError(f"{self._name} returned {what}, although send_weights had returned")
            if remaining(deadline) == 0.0:
                raise WeightSyncError(f"{self._name} returned only older weights until the deadline")
            last = found if final else 0
            await self._until(lambda: self._has_returned(offer))

    async def _received(self, offer: Offer, into: Buffer, own: Any, deadline: float | None, final: bool) -> Any:
        """Return what a call of ``receive_weights`` returns; None if it raises and is not ``final``."""
        self._require_open()
        if self._receiving is None and not self._has_failed(offer):
            options = {"weights": own, "strategy": self._strategy}
            receive = self._transport.receive_weights
            self._receiving = self._start(self._transfers, lambda _=into: receive(remaining(deadline), **options))
        call = self._receiving
        await self._until(lambda: call is None or call.done() or self._has_failed(offer))
        if call is None or self._has_failed(offer):  # the call may return the next update
            raise WeightSyncError(f"the sender could not send it: {self._sent.text}")
        self._receiving = None
        try:
            return call.result()
        except Exception as error:  # of a user's transport: raised again, or the method is called again, as documented
            self._require_open()
            if not final:
                return None
            if isinstance(error, ConnectionError):
                raise WeightSyncError(f"{self._name} raised {error!r}") from error  # the connection goes on
            raise

    def _has_returned(self, offer: Offer) -> bool:
        """Whether ``send_weights`` has returned for this update, or raised."""
        return self._sent.number >= offer.version

    def _has_failed(self, offer: Offer) -> bool:
        return self._has_returned(offer) and bool(self._sent.text)

    # --- both ---

    def _formatted(self, buffer: Buffer) -> Any:
        return self._strategy.extract_weights(dict(zip(buffer.layout.names, buffer.views, strict=True)))

    @property
    def _name(self) -> str:
        return f"{type(self._transport).__name__}.receive_weights"

    async def _set_up(self, link: Link, set_up: Callable[[TransportBackend], Any]) -> None:
        """Make the transport and set this end up, unless that has been done.

        An error ends the connection; the other end is told it first.
        """
        if self._is_set_up:
            return
        try:
            await self._call(self._make_and_set_up, set_up)
            self._is_set_up = True
        except Exception as error:  # of a user's transport: raised again, after the other end was told
            text = f"the set-up of the transport of worker {self._worker} has failed: {as_text(error)}"
            await link.send(Side(text=text))
            asyncio.get_running_loop().call_soon(link.close, ConnectionError(text))
            raise

    def _make_and_set_up(self, set_up: Callable[[TransportBackend], Any]) -> None:
        self._transport = require_transport(self._scheme.create_transport(self._worker))
        if self._ended:  # `close` came before there was a transport to close
            self._release()
        set_up(self._transport)

    def on_side(self, said: Side) -> None:
        if not said.number:  # the set-up has failed
            raise ConnectionError(said.text)
        self._sent = said
        self._changes.tell()

    def _release(self) -> None:
        close = getattr(self._transport, "close", None)
        try:
            if close is not None:
                close()
        except Exception:  # noqa: BLE001  of a user's transport: other connections have to end all the same
            _log.exception("%s.close() raised an error, which has no other effect", type(self._transport).__name__)
