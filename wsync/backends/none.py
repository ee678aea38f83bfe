"""No synchronization: the control, which shows what the other backends achieve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from wsync.scheme import WeightSyncScheme


class NoTransport:
    """Carries nothing (a ``TransportBackend``)."""

    def send_weights(self, weights: Any = None) -> None:
        """Send nothing."""

    def receive_weights(
        self, timeout: float | None = None, *, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> None:
        """Return None at once: nothing ever arrives."""

    def setup_connection_and_weights_on_sender(self) -> None:
        """Set up nothing."""

    def setup_connection_and_weights_on_receiver(
        self, *, worker_idx: int | None = None, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> None:
        """Set up nothing."""


class NoWeightSyncScheme(WeightSyncScheme):
    """Carries nothing: every call does nothing, and workers keep the weights that they have."""

    name = "none"
    sends_weights = False
    collectors: ClassVar[tuple[str, ...]] = (
        "multi_sync",
        "multi_async",
        "single",
        "distributed",
        "distributed_async",
        "rpc",
        "rpc_async",
        "ray",
        "ray_async",
    )

    def create_transport(self, worker_idx: Any = None) -> NoTransport:
        """Return a transport that carries nothing."""
        return NoTransport()

    def init_on_sender(self, model_id: str = "policy", context: Any = None, **given: Any) -> None:
        """Set up nothing."""

    def init_on_receiver(self, model_id: str = "policy", context: Any = None, **given: Any) -> None:
        """Set up nothing."""

    def init_on_worker(self, model_id: str = "policy", context: Any = None, **given: Any) -> None:
        """Set up nothing."""

    def get_sender(self) -> Any:
        """Return a sender that sends nothing."""
        return self.create_sender()

    def get_receiver(self) -> Any:
        """Return a receiver that receives nothing."""
        return self.create_receiver()

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """Return at once: there is nothing to connect."""

    def disconnect(self, worker_idx: int) -> None:
        """Return at once."""

    def readmit(self, worker_idx: int, sentinel: int | None = None, timeout: float | None = None) -> None:
        """Return at once."""

    def send(
        self, weights: Any = None, worker_ids: int | Sequence[int] | None = None, *, partial: bool = False
    ) -> None:
        """Send nothing."""

    def send_async(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> None:
        """Send nothing."""

    def wait_async(self) -> None:
        """Return at once."""

    def receive(self, timeout: float | None = None) -> bool:
        """Return False at once: nothing ever arrives."""
        return False
