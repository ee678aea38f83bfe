"""Weights through queues of the user's own: a transport that needs no scheme."""

from __future__ import annotations

import queue
import traceback
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue as ProcessQueue
from typing import Any, TypeAlias

from wsync.deadlines import deadline_in, remaining
from wsync.errors import SyncTimeout, WorkerFailed
from wsync.transport import TransportBackend, apply_received
from wsync.weights.snapshot import snapshot
from wsync.weights.tensors import require_whole

WeightQueue: TypeAlias = "queue.Queue[Any] | ProcessQueue[Any]"
_SLICE = 0.1  # seconds after which a wait for a queue looks whether it was closed


class MPTransport(TransportBackend):
    """Weights through a queue, acknowledgements through another (a ``TransportBackend``); or both through a pipe.

    Each end makes one over the same two queues, which have one reader each, or over its end of a pipe. ``weight_queue``
    carries ``(number, weights)`` to one worker, ``ack_queue`` ``(number, error)`` back, if there is one;
    ``send_weights`` waits for that, at most ``timeout`` seconds. A user's scheme may return one from
    ``create_transport``, without an ``ack_queue``: schemes acknowledge by their own connection.
    """

    def __init__(
        self, weight_queue: WeightQueue | Connection, ack_queue: WeightQueue | None = None, timeout: float | None = 60.0
    ) -> None:
        self._weights, self._timeout = weight_queue, timeout
        self._acks = weight_queue if isinstance(weight_queue, Connection) else ack_queue
        self._number = 0
        self._closed = False

    def send_weights(self, weights: Any) -> None:
        """Put a copy of ``weights``; wait for the acknowledgement, if any.

        SyncTimeout: none came in time. WorkerFailed: the worker could not apply them; carries its traceback.
        """
        given = snapshot(weights)
        require_whole(given.tensors)
        copy = {name: tensor.detach().clone() for name, tensor in given.tensors.items()}
        self._number += 1
        _put(self._weights, (self._number, {**copy, **(given.extra or {})}))
        acknowledged, error, deadline = 0, "", deadline_in(self._timeout)
        while self._acks is not None and acknowledged < self._number:  # older ones are of sends that timed out
            try:
                acknowledged, error = self._get(self._acks, deadline)
            except queue.Empty:
                raise SyncTimeout(f"the worker did not answer within {self._timeout} s") from None
        if error:
            raise WorkerFailed(f"the worker could not apply the weights:\n{error}")

    def receive_weights(self, timeout: float | None = None, **into: Any) -> Any | None:
        try:
            number, received = self._get(self._weights, deadline_in(timeout))
        except queue.Empty:
            return None
        error = "it was interrupted"
        try:
            applied = apply_received(received, **into)
            error = ""
            return applied
        except Exception:  # of any model; raised again here, and sent to the sender
            error = traceback.format_exc()
            raise
        finally:
            if self._acks is not None:
                _put(self._acks, (number, error))

    def setup_connection_and_weights_on_receiver(self, *, worker_idx: int | None = None, **into: Any) -> Any | None:
        """Without a scheme, wait for the first weights."""
        alone = into.get("model") is not None or into.get("weights") is not None
        return self.receive_weights(self._timeout, **into) if alone else None

    def close(self) -> None:
        """End a call that waits for a queue, within a tenth of a second. The queues stay open."""
        self._closed = True

    def _get(self, of: WeightQueue | Connection, deadline: float | None) -> Any:
        """Return the next item; queue.Empty: none came in time. ConnectionError: ``close`` was called."""
        while not self._closed:
            left = remaining(deadline)
            slice = _SLICE if left is None else min(left, _SLICE)
            try:
                if not isinstance(of, Connection):
                    return of.get(timeout=slice)
                if of.poll(slice):
                    return of.recv()
                raise queue.Empty
            except queue.Empty:
                if left is not None and left <= _SLICE:
                    raise
        raise ConnectionError("this transport was closed")


def _put(to: WeightQueue | Connection, item: Any) -> None:
    to.send(item) if isinstance(to, Connection) else to.put(item)
