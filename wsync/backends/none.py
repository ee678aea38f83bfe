"""No synchronization: the control, which shows what the others do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import nn

from wsync.legacy import WeightReceiver, WeightSender
from wsync.scheme import WeightSyncScheme
from wsync.sending.source import DeviceMap


class NoWeightSyncScheme(WeightSyncScheme):
    """Carries nothing: init, connect, send, receive, shutdown do nothing; workers keep the weights that they have."""

    name = "none"
    carries = False

    def init_on_sender(
        self,
        model_id: str = "policy",
        context: Any = None,
        *,
        model: nn.Module | None = None,
        weights: Any = None,
        devices: Sequence[Any] | None = None,
        device_map_fn: DeviceMap | None = None,
        num_workers: int | None = None,
        params_map: Mapping[int, Any] | None = None,
        pipes: Sequence[Any] | None = None,
    ) -> None:
        """Nothing to set up."""

    def init_on_receiver(
        self,
        model_id: str = "policy",
        context: Any = None,
        *,
        model: nn.Module | None = None,
        worker_idx: int | None = None,
    ) -> None:
        """Nothing to set up."""

    def init_on_worker(
        self,
        model_id: str = "policy",
        context: Any = None,
        *,
        pipe: Any = None,
        model: nn.Module | None = None,
        worker_idx: int | None = None,
    ) -> None:
        """Nothing to set up."""

    def get_sender(self) -> WeightSender:
        """Sends nothing."""
        return WeightSender(self)

    def get_receiver(self) -> WeightReceiver:
        """Receives nothing."""
        return WeightReceiver(self)

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """Nobody to meet."""

    def dismiss(self, worker_idx: int) -> None:
        """Nobody is sent anything."""

    def readmit(self, worker_idx: int, sentinel: int | None = None, timeout: float | None = None) -> None:
        """Nobody to meet."""

    def send(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> None:
        """Nothing is sent."""

    def send_async(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> None:
        """Nothing is sent."""

    def wait_async(self) -> None:
        """Nothing to wait for."""

    def receive(self, timeout: float | None = None) -> bool:
        """Nothing ever comes: False, at once."""
        return False

    def _make_sender_end(self, num_workers: int) -> NoReturn:
        raise RuntimeError("NoWeightSyncScheme has no transport")

    def _make_receiver_end(self, seed: Any) -> NoReturn:
        raise RuntimeError("NoWeightSyncScheme has no transport")
