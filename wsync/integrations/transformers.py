"""Hugging Face ``transformers``, and TRL, which is built on it: a callback that sends the model."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback  # pyright: ignore[reportMissingImports]

import wsync
from wsync.integrations import OnWorkerError, send


class WsyncCallback(TrainerCallback):
    """Sends the model after each ``every``-th step, and when the training ends; from the first rank alone.

    ``scheme`` is initialised with ``trainer.model``, and has connected: to processes that act, or to engines
    (``HTTPWeightSyncScheme``). ``on_worker_error`` is called with a ``WorkerDied``, ``WorkerFailed``, ``SyncTimeout``
    or ``NotConnected`` (no worker is left), and training goes on; None: such an error ends the training. Nothing is
    logged: ``scheme.metrics`` has the costs.
    """

    def __init__(
        self, scheme: wsync.WeightSyncScheme, every: int = 1, on_worker_error: OnWorkerError | None = None
    ) -> None:
        self.scheme, self.every, self.on_worker_error = scheme, every, on_worker_error

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.every == 0:
            self._send(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._send(state)  # also if the last step was sent: the best model may have been loaded since

    def _send(self, state: Any) -> None:
        if state.is_world_process_zero:
            send(self.scheme, self.on_worker_error)
