"""TorchRL: its multi-process collectors carry weights by a scheme of wsync.

scheme = TorchRLScheme(wsync.SharedMemWeightSyncScheme())
collector = MultiSyncCollector(…, weight_sync_schemes={"policy": scheme})
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrl.weight_update import WeightSyncScheme as Base  # pyright: ignore[reportMissingImports]

import wsync
from wsync.paths import find_model, find_or_none


class TorchRLScheme(Base):
    """A scheme for ``weight_sync_schemes=`` of TorchRL's ``MultiSyncCollector`` and ``MultiAsyncCollector``.

    ``scheme`` carries the weights; ``update_policy_weights_`` raises what its ``send`` raises. A ``policy=`` is on the
    device of its workers, and has no tied parameters, as TorchRL copies it; otherwise give a ``policy_factory``.
    """

    def __init__(self, scheme: wsync.WeightSyncScheme) -> None:
        super().__init__()
        self.scheme = scheme

    def _init_on_sender_impl(self, *, model_id: str, context: Any, **_: Any) -> None:
        self.model_id, self.context = model_id, context
        model = find_or_none(context, model_id)
        self.scheme.init_on_sender(model_id, model=model, num_workers=context.num_workers)

    def _init_on_receiver_impl(
        self, *, model_id: str, context: Any = None, model: Any = None, worker_idx: int | None = None
    ) -> None:
        self.model_id, self.context = model_id, context
        model = find_model(context, model_id) if model is None else model
        if any(tensor.is_meta for tensor in model.parameters()):  # TorchRL has sent it without weights
            model.to_empty(device=torch.device("cpu"))
        self.scheme.init_on_receiver(model_id, model=model, worker_idx=worker_idx)

    @property
    def model(self) -> nn.Module | None:
        """The model at this end."""
        return self.scheme.model

    @model.setter
    def model(self, model: nn.Module) -> None:
        raise ValueError("the collector has copied the policy: make it on policy_device, by a policy_factory")

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        if self.initialized_on_receiver:
            self.scheme.connect(worker_idx=worker_idx)
            self.synchronized_on_receiver = True
        else:
            self.scheme.connect(weights=weights, processes=self.context.procs)
            self.synchronized_on_sender = True

    def send(self, weights: Any = None, worker_ids: Any = None) -> wsync.SyncReport | None:
        return self.scheme.send(weights, worker_ids)

    def receive(self, timeout: float | None = None) -> Any:
        return self.scheme.receive(timeout)

    def create_transport(self, **_: Any) -> wsync.TransportBackend:
        return self.scheme.create_transport()

    def shutdown(self) -> None:
        self.scheme.shutdown()
        super().shutdown()
