"""Shared memory without a scheme: one set of buffers, which a sender writes and receivers copy."""

from __future__ import annotations

import multiprocessing
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import nn

from wsync.deadlines import deadline_in, remaining
from wsync.errors import NotConnected
from wsync.legacy.names import weights_of
from wsync.transport import apply_received
from wsync.weights.strategy import WeightStrategy


class SharedMemTransport:
    """Weights in shared memory, without a scheme (a ``TransportBackend``).

    ``SharedMemTransport()`` is handed to worker processes as an argument. Each call of ``receive_weights`` there waits
    for the next version and copies it. A scheme's ``shared_transport`` is a ``SharedMemSenderTransport``.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._changed = context.Condition()
        self._counter = context.Value("q", 0, lock=False)
        self._weights: TensorDictBase | None = None
        self._seen = 0

    def register_weights(self, weights: Any) -> None:
        """Define the shared buffers, before the transport is handed to a process.

        Args:
            weights: a module, a TensorDict or a state dict; copied.
        """
        extracted = WeightStrategy().extract_weights(weights)
        assert isinstance(extracted, TensorDict), "the default strategy's format"
        self._weights = extracted.clone().share_memory_()

    @property
    def unique_weights(self) -> list[TensorDictBase]:
        """The shared buffers, each once."""
        return [] if self._weights is None else [self._weights]

    def send_weights(self, weights: Any = None, older_weights: Any = None) -> None:
        """Publish one version. The older API's ``send_weights(model_id, weights)`` does the same.

        Raises:
            NotConnected: before ``register_weights``.
            LayoutMismatch: the weights do not fit.
        """
        with self._changed:
            WeightStrategy().apply_weights(self._buffers(), weights_of(weights, older_weights))
            self._counter.value += 1
            self._changed.notify_all()

    def check_connection(self) -> bool:
        """Return whether there are buffers. Of the older API."""
        return self._weights is not None

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """Wait for the next version; return a copy, applied to ``weights`` and ``model`` if given."""
        deadline = deadline_in(timeout)
        with self._changed:
            if not self._changed.wait_for(lambda: self._counter.value > self._seen, remaining(deadline)):
                return None
            self._seen = self._counter.value
            received = self._buffers().clone()
        return apply_received(received, weights, model, strategy)

    def _buffers(self) -> TensorDictBase:
        if self._weights is None:
            raise NotConnected("this transport has no buffers: call register_weights(weights) on the sender first")
        return self._weights

    def setup_connection_and_weights_on_sender(self) -> None:
        """See ``TransportBackend``: nothing to do."""

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """See ``TransportBackend``: the first weights arrive by ``receive_weights``."""
        return None
