"""An update that is being sent to one worker. There are four ways to send it, a class for each.

- ``FlatDelivery``, to a ``FlatTransport``: ``UPDATE`` (or ``PREPARE``) and ``begin_send``, which comes first if the
  transport ``receives_ahead``
- ``InlineDelivery``, over the control connection, for updates of at most ``FlatTransport.inline_bytes``:
  ``UPDATE_WITH_WEIGHTS``
- ``BlockingDelivery``, to a ``TransportBackend``: ``BEGIN_RECEIVE``, then ``send_weights`` in the worker's transfer
  thread, then ``UPDATE`` (or ``PREPARE``)
- ``DifferenceDelivery``, as a difference to the version that the worker has, over the control connection: ``DELTA``,
  then ``UPDATE`` (or ``PREPARE``)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from wsync.control.messages import Kind
from wsync.sending.queued_update import QueuedUpdate
from wsync.sending.transfer_thread import TransferThread
from wsync.transport import FlatTransport, Transfer

Send = Callable[[Kind, int, bytes], None]
"""``(kind, version, payload)``: sends a message to the worker, over its control connection."""


class Delivery(ABC):
    """An update that is being sent to one worker. Used under the channel's lock.

    A signal handler may raise between any two steps. ``advance`` then continues from there when it is called next; a
    message may have been sent twice.

    Args:
        update: the update.
        send: sends a message to the worker.
        checked: whether the payload has a checksum.
    """

    def __init__(self, update: QueuedUpdate, send: Send, *, checked: bool) -> None:
        self.update = update
        self._send = send
        self._checked = checked
        self._announced = False

    @abstractmethod
    def advance(self) -> None:
        """Do the steps that can be done now, and were not done yet."""
        ...

    def abort_later(self) -> bool:
        """Return whether ``ABORT`` has to follow ``PREPARE``, which is not sent yet; this object then sends it."""
        return False

    def _announce(self) -> None:
        update = self.update
        payload = update.transaction_prefix + update.payload(checked=self._checked)
        self._send(update.kind, update.version, payload)


class DifferenceDelivery(Delivery):
    """An update that is sent as a difference to the version that the worker has.

    Args:
        update, send, checked: see ``Delivery``.
        difference: the payload of ``DELTA``.
    """

    def __init__(self, update: QueuedUpdate, send: Send, difference: bytes, *, checked: bool) -> None:
        super().__init__(update, send, checked=checked)
        self._difference = difference

    def advance(self) -> None:
        """See ``Delivery``."""
        if not self._announced:
            self._send(Kind.DELTA, self.update.version, self._difference)
            self._announce()
            self._announced = True


class FlatDelivery(Delivery):
    """An update that a ``FlatTransport`` sends in one asynchronous transfer of its buffer.

    Args:
        update, send, checked: see ``Delivery``.
        transport: the transport to the worker.
        on_broken: called with the error if the transport has broken.
    """

    def __init__(
        self,
        update: QueuedUpdate,
        send: Send,
        transport: FlatTransport,
        on_broken: Callable[[RuntimeError], None],
        *,
        checked: bool,
    ) -> None:
        super().__init__(update, send, checked=checked)
        self._transport = transport
        self._on_broken = on_broken
        self._transfers: list[Transfer] = []  # empty until ``begin_send`` has appended the one transfer

    @property
    def pending(self) -> Transfer | None:
        """The transfer, if it has begun."""
        return self._transfers[0] if self._transfers else None

    def begin_ahead(self) -> None:
        """Begin the transfer before the update is announced, if the worker begins to receive that early."""
        if self._transport.receives_ahead:
            self._begin()

    def advance(self) -> None:
        """See ``Delivery``."""
        if not self._announced:
            self._announce()
            self._announced = True
        self._begin()

    def _begin(self) -> None:
        if not self._transfers:
            try:
                self._transport.begin_send(self.update.buffer.flat, self._transfers)
            except RuntimeError as error:
                self._on_broken(error)


class InlineDelivery(Delivery):
    """An update with weights that travel in the message that announces them: see ``FlatTransport.inline_bytes``."""

    def advance(self) -> None:
        """See ``Delivery``."""
        if not self._announced:
            payload = self.update.payload_with_weights(checked=self._checked)
            self._send(Kind.UPDATE_WITH_WEIGHTS, self.update.version, payload)
            self._announced = True


class BlockingDelivery(Delivery):
    """An update that ``send_weights`` of a ``TransportBackend`` sends, in the worker's transfer thread.

    Args:
        update, send, checked: see ``Delivery``.
        thread: calls ``send_weights``.
        weights_for_transport: ``(update) -> weights`` in the strategy's format, views of the update's buffer.
    """

    def __init__(
        self,
        update: QueuedUpdate,
        send: Send,
        thread: TransferThread,
        weights_for_transport: Callable[[QueuedUpdate], Any],
        *,
        checked: bool,
    ) -> None:
        super().__init__(update, send, checked=checked)
        self._thread = thread
        self._weights_for_transport = weights_for_transport
        self._begun = False  # the thread has the call
        self._ended = False  # its end was noticed
        self._aborted = False

    def advance(self) -> None:
        """See ``Delivery``."""
        update = self.update
        if not self._announced:
            self._send(Kind.BEGIN_RECEIVE, update.version, update.payload(checked=self._checked))
            self._announced = True
        if not self._begun:
            if update.formatted is None:
                update.formatted = self._weights_for_transport(update)
            self._thread.begin(update.formatted)
            self._begun = True

    def abort_later(self) -> bool:
        """See ``Delivery``: ``PREPARE`` is sent when ``send_weights`` has returned."""
        self._aborted = self._aborted or self.in_call
        return self.in_call

    @property
    def in_call(self) -> bool:
        """Whether ``send_weights`` was called, and ``end_call`` has not noticed its end."""
        return self._begun and not self._ended

    @property
    def error(self) -> str | None:
        """The traceback of the call, once its end was noticed; None if it has raised nothing."""
        return self._thread.error if self._ended else None

    def end_call(self) -> None:
        """If the call of ``send_weights`` has ended, send ``UPDATE`` or ``PREPARE``, or ``ABORT`` if it has raised."""
        update = self.update
        if self._thread.busy or not self.in_call:
            return
        if self._thread.error is not None:
            self._send(Kind.ABORT, update.version, b"")
        else:
            self._send(update.kind, update.version, update.transaction_prefix)
            if self._aborted:
                self._send(Kind.ABORT, update.transaction, b"")
        self._ended = True  # last: if a signal handler raises before, all is sent once more, which is harmless
