"""A scheme's lines as public transports: the sender's to some workers, a worker's to its sender."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import nn

from wsync.receiving.gate import process_gate
from wsync.receiving.receiver import Receiver
from wsync.sending.sender import Sender
from wsync.weights.strategy import WeightStrategy


class ConnectWorker(Protocol):
    """A worker's ``scheme.connect``."""

    def __call__(self, *, worker_idx: int | None = None) -> None:
        """The rendezvous."""
        ...


class SendOnly:
    """The half of a ``TransportBackend`` that a trainer's line has not."""

    def receive_weights(self, timeout: float | None = None, **_: Any) -> Any | None:
        """A sender's line does not receive.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("this is the sender's end of the line: receive in the worker, on its scheme")

    def setup_connection_and_weights_on_receiver(self, **_: Any) -> Any | None:
        """A sender's line does not receive.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("this is the sender's end of the line: connect the worker's by its scheme, in the worker")


class SenderPort(SendOnly):
    """A trainer's line to some of its workers (a ``TransportBackend``).

    Args:
        sender: sends.
        connect: the scheme's.
        worker_ids: whom; None for all.
    """

    def __init__(self, sender: Sender, connect: Callable[[], None], worker_ids: Sequence[int] | None) -> None:
        self._sender = sender
        self._connect = connect
        self._worker_ids = worker_ids

    def send_weights(self, weights: Any = None) -> None:
        """Deliver ``weights`` (None: the model's) and wait for the answers."""
        self._sender.send(weights, self._worker_ids, wait=True)

    def setup_connection_and_weights_on_sender(self) -> None:
        """The rendezvous with every worker of the scheme, unless it has been."""
        if not self._sender.connected:
            self._connect()


class ReceiverPort:
    """A worker's line to its trainer (a ``TransportBackend``).

    Args:
        receiver: receives.
        connect: the scheme's.
    """

    def __init__(self, receiver: Receiver, connect: ConnectWorker) -> None:
        self._receiver = receiver
        self._connect = connect

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
        return self._receiver.receive(timeout, partial(self._hand_on, weights, model, strategy))

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """The rendezvous; the first weights, if they come with it."""
        self._connect(worker_idx=worker_idx)
        if not self._receiver.version:
            return None
        return process_gate().call(self._hand_on, weights, model, strategy)

    def _hand_on(self, weights: Any, model: nn.Module | None, strategy: WeightStrategy | None) -> Any:
        """Put what was received where the caller wants it: in the gate, so that it is one version."""
        own, chosen = self._receiver.model, strategy or WeightStrategy()
        for destination in (weights, model):
            if destination is not None and destination is not own:
                chosen.apply_weights(destination, own)
        return self._receiver.weights() if strategy is None else strategy.extract_weights(own)
