"""Weights through queues of the user's own: a transport that needs no scheme."""

from __future__ import annotations

import queue
import traceback
from typing import Any, Protocol

from torch import nn

from wsync.deadlines import deadline_in, remaining
from wsync.errors import SyncTimeout, WorkerFailed
from wsync.transport import TransportBackend, apply_received, weights_of
from wsync.weights.snapshot import snapshot
from wsync.weights.strategy import WeightStrategy
from wsync.weights.tensors import require_whole

_SLICE = 0.1  # seconds after which a wait for a queue looks whether it was closed


class QueueLike(Protocol):
    """What ``queue.Queue`` and ``multiprocessing.Queue`` have in common."""

    def put(self, item: Any) -> None:
        """Append ``item``."""
        ...

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the first item; raises ``queue.Empty`` at the timeout."""
        ...


class MPTransport(TransportBackend):
    """Weights through a queue, acknowledgements through another (a ``TransportBackend``).

    Each end makes one over the same two queues. It needs no scheme; a user's scheme may return one from
    ``create_transport``, without an ``ack_queue``: schemes acknowledge by their own connection. Timeouts are measured
    by the monotonic clock, with one exception: where several processes or threads read one ``multiprocessing.Queue``
    at once, they wait for its lock, and ``multiprocessing`` does so by the wall clock.

    Args:
        weight_queue: carries ``(number, weights)`` to one worker.
        ack_queue: carries ``(number, error)`` back; None for no acknowledgements.
        timeout: seconds that ``send_weights`` waits for an acknowledgement; None for no limit.
    """

    def __init__(
        self, weight_queue: QueueLike, ack_queue: QueueLike | None = None, timeout: float | None = 60.0
    ) -> None:
        self._weights = weight_queue
        self._acks = ack_queue
        self._timeout = timeout
        self._number = 0
        self._acknowledged = 0
        self._closed = False

    def send_weights(self, weights: Any, older_weights: Any = None) -> None:
        """Put a copy of ``weights`` (a module, a TensorDict, a state dict); wait for the acknowledgement.

        The older API's ``send_weights(model_id, weights)`` does the same.

        Raises:
            SyncTimeout: none came in time.
            WorkerFailed: the worker could not apply them; carries its traceback.
        """
        self.send_weights_async(weights, older_weights)
        self.wait_ack()

    def send_weights_async(self, weights: Any, older_weights: Any = None) -> None:
        """Put a copy of ``weights``; ``wait_ack`` waits for the acknowledgement. Of the older API."""
        given = snapshot(weights_of(weights, older_weights))
        require_whole(given.tensors, given.tensors.values())
        copy = {name: tensor.detach().clone() for name, tensor in given.tensors.items()}
        self._number += 1
        self._weights.put((self._number, {**copy, **(given.extra or {})}))

    def wait_ack(self) -> None:
        """Wait for the acknowledgement of the newest weights, unless there is no ``ack_queue``.

        Raises:
            SyncTimeout, WorkerFailed: as ``send_weights``.
        """
        if self._acks is None:
            return
        deadline = deadline_in(self._timeout)
        error = ""
        while self._acknowledged < self._number:  # an older one, of a send that timed out, does not count
            try:
                self._acknowledged, error = self._get(self._acks, deadline)
            except queue.Empty:
                raise SyncTimeout(f"the worker did not answer within {self._timeout} s") from None
        if error:
            raise WorkerFailed(f"the worker could not apply the weights:\n{error}")

    def check_connection(self) -> bool:
        """Return True: queues need no connection. Of the older API."""
        return True

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """Return the next weights, applied to ``model`` (inside the gate) and ``weights``; None if none came.

        Raises:
            ConnectionError: ``close`` was called.
        """
        try:
            number, received = self._get(self._weights, deadline_in(timeout))
        except queue.Empty:
            return None
        error = ""
        try:
            return apply_received(received, weights, model, strategy)
        except BaseException:  # of any model, or of a signal handler; raised again here, and sent to the sender
            error = traceback.format_exc()
            raise
        finally:
            if self._acks is not None:
                self._acks.put((number, error))

    def close(self) -> None:
        """End a call that waits for a queue, within a tenth of a second. The queues stay open."""
        self._closed = True

    def _get(self, of: QueueLike, deadline: float | None) -> Any:
        """Return the next item of a queue.

        Raises:
            queue.Empty: none came by the deadline.
            ConnectionError: ``close`` was called.
        """
        while not self._closed:
            left = remaining(deadline)
            try:
                return of.get(timeout=_SLICE if left is None else min(left, _SLICE))
            except queue.Empty:
                if left is not None and left <= _SLICE:
                    raise
        raise ConnectionError("this transport was closed")

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """Without a scheme, wait for the first weights."""
        if model is None and weights is None:
            return None
        return self.receive_weights(self._timeout, weights=weights, model=model, strategy=strategy)
