"""PyTorch Lightning: a callback that sends a module's weights."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback  # pyright: ignore[reportMissingImports]

import wsync
from wsync.integrations import OnWorkerError, send


class WsyncCallback(Callback):
    """Sends the weights after each ``every``-th optimizer step, and when the training ends; from the first rank alone.

    ``scheme`` is initialised with the module, or a part of it, and has connected. ``on_worker_error`` is called with a
    ``WorkerDied``, ``WorkerFailed``, ``SyncTimeout`` or ``NotConnected`` (no worker is left), and training goes on;
    None: such an error ends the training. ``weight_sync/version`` is logged.
    """

    def __init__(
        self, scheme: wsync.WeightSyncScheme, every: int = 1, on_worker_error: OnWorkerError | None = None
    ) -> None:
        self.scheme, self.every, self.on_worker_error, self._sent = scheme, every, on_worker_error, 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._sent = trainer.global_step  # a new trainer begins at 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step >= self._sent + self.every:  # a batch may be a part of a step
            self._send(trainer)
            pl_module.log("weight_sync/version", float(self.scheme.version), rank_zero_only=True)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._send(trainer)  # after callbacks that change the weights when the training ends, such as to an average

    def _send(self, trainer: Any) -> None:
        self._sent = trainer.global_step
        if trainer.is_global_zero:
            send(self.scheme, self.on_worker_error)
