"""A worker's updates from a ``FlatTransport``: one asynchronous transfer for each version, or one message."""

from __future__ import annotations

import threading

import torch

from wsync.checksum import find_damage
from wsync.deadlines import as_timedelta
from wsync.receiving.events import Failed, Published
from wsync.receiving.transport_reader import TransportReader
from wsync.transport import FlatTransport, Transfer
from wsync.transport_setup import close_transport
from wsync.types import Update
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer


class FlatReader(TransportReader):
    """The weights of a version follow its ``UPDATE`` or ``PREPARE`` message. Its transfer may begin before.

    The weights of a small update are in its ``UPDATE_WITH_WEIGHTS`` message: see ``FlatTransport.inline_bytes``.

    Args:
        transport: connected; owned by this object.
        binds, timeout: see ``TransportReader``.
    """

    def __init__(self, transport: FlatTransport, *, binds: bool, timeout: float | None) -> None:
        super().__init__(transport.device, binds=binds, timeout=timeout)
        self._transport = transport
        self._timeout_delta = as_timedelta(timeout)
        self._checksum = True
        self._incoming: Buffer | None = None  # of the next version
        self._transfers: list[Transfer] = []  # into that buffer; empty until the transfer has begun, then it has one
        self._beginning = threading.Lock()  # with initiator="receiver", two threads may call ``_begin``

    def set_layout(self, layout: Layout, checksum: bool | None, *, delta: bool) -> None:
        """See ``TransportReader``."""
        super().set_layout(layout, checksum, delta=delta)
        self._checksum = checksum is not False
        self.receive_ahead()

    def receive_ahead(self) -> None:
        """Begin to receive the next version before it is announced, so that it costs no round trip.

        Called when the layout is known and after each acknowledgement, by the thread that has sent it: from then on the
        sender may send. Does nothing if the transport does not receive ahead, or has begun to: the versions since then
        came in messages.
        """
        if self._layout is None or not self._transport.receives_ahead:
            return
        try:
            self._begin()
        except RuntimeError:  # the transport has broken: the next announced version finds that
            return

    def _begin(self) -> tuple[Buffer, Transfer]:
        """Begin the transfer of the next version, unless it has begun."""
        with self._beginning:
            if self._incoming is None:
                self._incoming = self._take_buffer()
            if not self._transfers:
                self._transport.begin_receive(self._incoming.flat, self._transfers)
            return self._incoming, self._transfers[0]

    def _receive(self, version: int, payload: bytes) -> Update | None:
        if version <= self._received:
            return None
        try:
            buffer, transfer = self._begin()
            transfer.wait(self._timeout_delta)
            if buffer.flat.is_cuda:
                torch.cuda.current_stream(buffer.flat.device).synchronize()
        except RuntimeError as error:
            raise ConnectionError(f"the transport has broken: {error}") from error
        self._incoming, self._transfers = None, []
        return self._arrived(version, buffer, payload)

    def on_update_with_weights(self, version: int, payload: bytes) -> Published | Failed | None:
        """Process an ``UPDATE_WITH_WEIGHTS`` message, like ``on_update``."""
        nbytes = self._require_layout().nbytes
        if len(payload) < nbytes:
            raise ValueError(f"the payload has {len(payload)} bytes, and the weights have {nbytes}")
        if version <= self._received:
            return None
        self._drop_reconstructed()
        buffer, begin = self._take_buffer(), len(payload) - nbytes
        buffer.flat.numpy()[:] = memoryview(payload)[begin:]
        return self._published(self._arrived(version, buffer, payload[:begin]))

    def _arrived(self, version: int, buffer: Buffer, payload: bytes) -> Update:
        """Return the update in ``buffer``; ``payload`` has its checksum and extra state, as in ``UPDATE``."""
        self._received = version
        checksum, extra = self._split(payload) if self._checksum else (None, payload)
        damage = "" if checksum is None else find_damage(version, buffer.flat, extra, checksum)
        return Update(version, buffer.views, extra, buffer.slot, damage=damage)

    def close(self) -> None:
        """See ``TransportReader``."""
        close_transport(self._transport, self._transfers[0] if self._transfers else None)
        self._incoming, self._transfers = None, []
        super().close()
