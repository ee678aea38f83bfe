"""The thread that runs a transport's ``send_weights`` for one worker, so that the wait for it can end at a deadline."""

from __future__ import annotations

import os
import threading
import traceback
from queue import SimpleQueue
from typing import Any

from wsync.transport import TransportBackend
from wsync.transport_setup import close_transport


class TransferThread:
    """Calls ``send_weights``, one call at a time. The public methods are called under the channel's lock.

    Args:
        transport: the transport of one worker.
        wake: an eventfd that is written when a call has ended.

    Attributes:
        busy: whether a call is in progress.
        error: the traceback of the last call; None if it succeeded.
        broken: whether the last call raised a ``ConnectionError``: what the transport sends can no longer arrive.
    """

    def __init__(self, transport: TransportBackend, wake: int) -> None:
        self._transport = transport
        self._wake = os.dup(wake)
        self._calls: SimpleQueue[Any] = SimpleQueue()
        self.error: str | None = None
        self.broken = False
        self.busy = False
        self._thread = threading.Thread(target=self._run, name="wsync-transfer", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            if self._thread.ident is None:  # else a signal handler has raised, and the thread closes it
                os.close(self._wake)
            self._calls.put(None)
            raise

    def begin(self, weights: Any) -> None:
        """Begin to send ``weights``. The thread must not be busy."""
        self.error, self.broken, self.busy = None, False, True
        self._calls.put((weights,))

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            (weights,) = call
            try:
                self._transport.send_weights(weights)
            except BaseException as error:  # noqa: BLE001  a transport may raise anything; the trainer raises it
                self.error, self.broken = traceback.format_exc(), isinstance(error, ConnectionError)
            del call, weights
            self.busy = False
            os.eventfd_write(self._wake, 1)
        os.close(self._wake)

    def close(self) -> threading.Thread:
        """Close the transport, which ends a blocking call; return the thread, which then ends."""
        self._calls.put(None)
        close_transport(self._transport)
        return self._thread
