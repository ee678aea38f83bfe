"""The usual medium: the bytes of an update follow its offer, on the connection itself."""

from __future__ import annotations

from wsync.control.wire import Link, Offer
from wsync.weights.packing import Buffer


class InlineMedium:
    """Needs nothing but the connection. Other media derive from it, for what they do not carry themselves.

    Attributes:
        waits_for_close: on the sender, whether ``send`` is in code that only ``close`` ends.
    """

    waits_for_close = False

    async def send(self, link: Link, offer: Offer, payload: Buffer | bytes) -> None:
        """Send the offer, and at once the bytes: whole weights, or a difference."""
        await link.send(offer, payload if isinstance(payload, bytes) else payload.memory)

    async def receive(self, link: Link, offer: Offer, into: Buffer) -> None:
        """Refuse: the session itself reads what follows an offer."""
        raise ConnectionError("the sender uses a medium that this worker does not have")

    def on_side(self, data: bytes) -> None:
        """Refuse: the other end has no medium."""
        raise ConnectionError("the other end uses a medium that this one does not have")

    def on_sent(self, version: int, error: str) -> None:
        """Do nothing: what follows an offer is whole, or the connection has ended."""

    def close(self) -> None:
        """Do nothing: the connection is the session's."""

    async def wait_closed(self) -> None:
        """Return at once."""
