"""The line between a trainer and its workers as the interface has it: weights in, weights out."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import nn

from wsync.weights.strategy import WeightStrategy


@runtime_checkable
class TransportBackend(Protocol):
    """A line between a trainer and one worker (or all of them), for use without a scheme's lifecycle.

    Stateless towards model and strategy: whoever calls brings them.
    """

    def send_weights(self, weights: Any) -> None:
        """Deliver ``weights`` to the worker(s) at the other end, and wait for their answer."""
        ...

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """The next weights; None if none came within ``timeout`` seconds.

        Args:
            timeout: seconds; None for no limit.
            weights: a buffer (TensorDict or state dict) to receive into.
            model: applied to this model as well, through the gate.
            strategy: how they are applied, and the format of the result; None for the default one.
        """
        ...

    def setup_connection_and_weights_on_sender(self) -> None:
        """The sender's half of the rendezvous."""
        ...

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """The receiver's half of the rendezvous; the first weights, if they come with it."""
        ...
