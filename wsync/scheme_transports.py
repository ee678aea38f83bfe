"""A connected scheme as transports: ``scheme.sender_transports``, ``shared_transport`` and ``receiver_transport``.

What is sent and received by them goes through the scheme, with its versions, acknowledgements and gate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from wsync.gate import process_gate
from wsync.transport import SenderEnd, weights_of
from wsync.weights.strategy import WeightStrategy

if TYPE_CHECKING:
    from wsync.receiver import Receiver
    from wsync.sender import Sender


class SenderTransport(SenderEnd):
    """The sender's way to some workers (a ``TransportBackend``).

    Args:
        sender: the sender of the scheme.
        connect: the scheme's.
        worker_ids: the workers; None for all.
        model_id: the model's name.
    """

    def __init__(
        self,
        sender: Sender,
        connect: Callable[[], None],
        worker_ids: Sequence[int] | None,
        model_id: str | None = None,
    ) -> None:
        self._sender = sender
        self._connect = connect
        self._worker_ids = worker_ids
        self._model_id = model_id

    def send_weights(self, weights: Any = None, older_weights: Any = None) -> None:
        """Deliver ``weights`` (None: the model's), and wait for the acknowledgements.

        The older API's ``send_weights(model_id, weights)`` does the same.
        """
        self._sender.send(weights_of(weights, older_weights, self._model_id), self._worker_ids)

    def send_weights_async(self, weights: Any = None, older_weights: Any = None) -> None:
        """Begin to deliver ``weights``; ``wait_ack`` waits. Of the older API."""
        self._sender.send(weights_of(weights, older_weights, self._model_id), self._worker_ids, wait=False)

    def wait_ack(self) -> None:
        """Wait until what ``send_weights_async`` has sent is installed. Of the older API; raises as ``wait_async``."""
        self._sender.wait()

    def check_connection(self) -> bool:
        """Return whether the workers are connected. Of the older API."""
        return self._sender.connected

    def setup_connection_and_weights_on_sender(self) -> None:
        """Connect to all workers of the scheme, unless that has been done."""
        if not self._sender.connected:
            self._connect()


class ReceiverTransport:
    """A worker's way from its sender (a ``TransportBackend``).

    Args:
        receiver: the receiver of the scheme.
        connect: the scheme's.
    """

    def __init__(self, receiver: Receiver, connect: Callable[..., None]) -> None:
        self._receiver = receiver
        self._connect = connect

    def check_connection(self) -> bool:
        """Return whether this end is connected and its sender has not ended. Of the older API."""
        return self._receiver.connected

    def send_weights(self, weights: Any) -> None:
        """Refuse: this is the worker's end.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("this is the worker's end: send by the trainer's scheme")

    def setup_connection_and_weights_on_sender(self) -> None:
        """Refuse: this is the worker's end.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("this is the worker's end: the sender connects by scheme.connect()")

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """Return the next version, installed in the scheme's model; also applied to ``weights`` and ``model``."""
        return self._receiver.receive(timeout, partial(self._copy_to, weights, model, strategy))

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """Connect; return the first weights, if the sender has any."""
        self._connect(worker_idx=worker_idx)
        if not self._receiver.version:
            return None
        return process_gate().call_model(
            self._receiver.destination.model, self._copy_to, (weights, model, strategy), {}
        )

    def _copy_to(self, weights: Any, model: nn.Module | None, strategy: WeightStrategy | None) -> Any:
        """Apply the model's weights to other destinations; inside the gate, so that they are of one version."""
        own, chosen = self._receiver.destination.model, strategy or WeightStrategy()
        if own is None:  # a function has loaded them
            return self._receiver.weights()
        for destination in (weights, model):
            if destination is not None and destination is not own:
                chosen.apply_weights(destination, own)
        return self._receiver.weights() if strategy is None else strategy.extract_weights(own)
