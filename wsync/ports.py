"""A scheme's lines as public transports: the sender's to some workers, a worker's to its sender."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from wsync.gate import process_gate
from wsync.receiver import Receiver
from wsync.sender import Sender
from wsync.strategy import WeightStrategy


class SenderPort:
    """A trainer's line to some of its workers (a ``TransportBackend``)."""

    def __init__(self, sender: Sender, sentinels: Mapping[int, int], worker_ids: Sequence[int] | None) -> None:
        self._sender = sender
        self._sentinels = sentinels
        self._worker_ids = worker_ids

    def send_weights(self, weights: Any = None) -> None:
        """Deliver ``weights`` (None: the model's) and wait for the answers."""
        self._sender.send(weights, self._worker_ids, wait=True)

    def setup_connection_and_weights_on_sender(self) -> None:
        """The rendezvous with every worker of the scheme, unless it has been."""
        if not self._sender.connected:
            self._sender.connect(None, self._sentinels)

    def receive_weights(self, timeout: float | None = None, **_: Any) -> Any | None:
        """A sender's line does not receive.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("this is the sender's end of the line: receive on scheme.receiver_transport, in the worker")

    def setup_connection_and_weights_on_receiver(self, **_: Any) -> Any | None:
        """A sender's line does not receive.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("this is the sender's end of the line: connect the worker's by scheme.receiver_transport")


class ReceiverPort:
    """A worker's line to its trainer (a ``TransportBackend``)."""

    def __init__(self, receiver: Receiver, timeout: float | None) -> None:
        self._receiver = receiver
        self._timeout = timeout

    def send_weights(self, weights: Any) -> None:
        """A worker's line does not send.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("this is the worker's end of the line: send on the trainer's scheme")

    def setup_connection_and_weights_on_sender(self) -> None:
        """A worker's line does not send.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("this is the worker's end of the line: connect the sender's by scheme.connect()")

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """The next weights (installed in the scheme's model), put into ``weights`` and ``model`` as well if given."""
        received = self._receiver.receive(timeout)
        return None if received is None else _hand_on(received, weights, model, strategy, self._receiver.model)

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """The rendezvous; the first weights, if they come with it."""
        if worker_idx is None:
            raise ValueError("which worker is this? give worker_idx")
        self._receiver.connect(worker_idx, self._timeout)
        if not self._receiver.version:
            return None
        received = WeightStrategy().extract_weights(self._receiver.model)
        return _hand_on(received, weights, model, strategy, self._receiver.model)


def _hand_on(
    received: Any, weights: Any, model: nn.Module | None, strategy: WeightStrategy | None, own: nn.Module
) -> Any:
    """Put what was received where the caller wants it; inside the gate, so that it is one version."""
    chosen = strategy or WeightStrategy()
    with process_gate().hold():
        if weights is not None:
            chosen.apply_weights(weights, received)
        if model is not None and model is not own:
            chosen.apply_weights(model, received)
    return received if strategy is None else strategy.extract_weights(own)
