"""A connected scheme as transports: ``scheme.sender_transports``, ``shared_transport`` and ``receiver_transport``.

What is sent and received by them goes through the scheme, with its versions, acknowledgements and gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from wsync.gate import process_gate
from wsync.transport import SenderEnd, weights_of
from wsync.weights.strategy import WeightStrategy

if TYPE_CHECKING:
    from wsync.scheme import WeightSyncScheme


class SenderTransport(SenderEnd):
    """The sender's way to some workers (a ``TransportBackend``). The first call connects the scheme, if it has to be.

    Args:
        scheme: the sender's.
        worker_ids: the workers; None for all.
    """

    def __init__(self, scheme: WeightSyncScheme, worker_ids: Sequence[int] | None = None) -> None:
        self._scheme = scheme
        self._worker_ids = worker_ids

    def _send(self, weights: Any, older_weights: Any, *, wait: bool) -> None:
        self.setup_connection_and_weights_on_sender()
        given = weights_of(weights, older_weights, self._scheme.model_id)
        self._scheme.sender.send(given, self._worker_ids, wait=wait)

    def send_weights(self, weights: Any = None, older_weights: Any = None) -> None:
        """Deliver ``weights`` (None: the model's). The older API's form is ``send_weights(model_id, weights)``."""
        self._send(weights, older_weights, wait=True)

    def send_weights_async(self, weights: Any = None, older_weights: Any = None) -> None:
        """Begin to deliver ``weights``; ``wait_ack`` waits. Of the older API."""
        self._send(weights, older_weights, wait=False)

    def wait_ack(self) -> None:
        """Wait until what ``send_weights_async`` has sent is installed. Of the older API; raises as ``wait_async``."""
        self._scheme.wait_async()

    def check_connection(self) -> bool:
        """Return whether all workers are connected. Of the older API."""
        return self._scheme.is_sender and self._scheme.sender.connected

    def setup_connection_and_weights_on_sender(self) -> None:
        """Connect to all workers of the scheme, unless that has been done."""
        if not self._scheme.sender.connected:
            self._scheme.connect()


class ReceiverTransport:
    """A worker's way from its sender (a ``TransportBackend``).

    Args:
        scheme: the worker's.
    """

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self._scheme = scheme

    def check_connection(self) -> bool:
        """Return whether this end is connected and its sender has not ended. Of the older API."""
        return self._scheme._as_receiver("check_connection").connected

    def send_weights(self, weights: Any) -> NoReturn:
        """Raise RuntimeError: this is the worker's end."""
        raise RuntimeError("this is the worker's end: the sender connects and sends, by its scheme")

    def setup_connection_and_weights_on_sender(self) -> NoReturn:
        """Raise RuntimeError: this is the worker's end."""
        self.send_weights(None)

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """Return the next version, installed in the scheme's model; also applied to ``weights`` and ``model``."""
        receiver = self._scheme._as_receiver("receive_weights")
        return receiver.receive(timeout, partial(self._copy_to, weights, model, strategy))

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """Connect; return the first weights, if the sender has any."""
        self._scheme.connect(worker_idx=worker_idx)
        if not self._scheme.version:
            return None
        return process_gate().call_model(self._scheme.model, self._copy_to, (weights, model, strategy), {})

    def _copy_to(self, weights: Any, model: nn.Module | None, strategy: WeightStrategy | None) -> Any:
        """Apply the model's weights to other destinations; inside the gate, so that they are of one version."""
        receiver, own = self._scheme._as_receiver("receive_weights"), self._scheme.model
        if own is not None:  # else a function has loaded them
            for destination in (weights, model):
                if destination is not None and destination is not own:
                    (strategy or WeightStrategy()).apply_weights(destination, own)
        return receiver.weights() if own is None or strategy is None else strategy.extract_weights(own)
