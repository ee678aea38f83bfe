"""Stable-Baselines3: a callback that sends the policy of any of its algorithms."""

from __future__ import annotations

import warnings

from stable_baselines3.common.callbacks import BaseCallback  # pyright: ignore[reportMissingImports]

import wsync
from wsync.integrations import OnWorkerError, send


class WsyncCallback(BaseCallback):
    """Sends the policy after each ``every``-th round of gradient steps, and when training ends.

    ``scheme`` is initialised with ``model.policy``, and has connected. ``on_worker_error`` is called with a
    ``WorkerDied``, ``WorkerFailed``, ``SyncTimeout`` or ``NotConnected`` (no worker is left), and training goes on;
    None: such an error ends the training. ``weight_sync/version`` and ``weight_sync/seconds`` are logged.
    """

    def __init__(
        self, scheme: wsync.WeightSyncScheme, every: int = 1, on_worker_error: OnWorkerError | None = None
    ) -> None:
        super().__init__()
        self.scheme, self.every, self.on_worker_error, self._rollouts = scheme, every, on_worker_error, 0

    def _on_training_start(self) -> None:
        sent = any(part is self.scheme.model for part in self.model.policy.modules())  # else the user sends more
        if sent and self.model.get_vec_normalize_env() is not None:
            said = "the policy acts on observations that VecNormalize has normalised; its statistics are not sent"
            warnings.warn(f"{said}: docs/integrations.md says what the other process has to do", stacklevel=2)

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:  # each but the first follows gradient steps
        if self._rollouts and self._rollouts % self.every == 0:
            self._send()
        self._rollouts += 1

    def _on_training_end(self) -> None:
        self._send()

    def _send(self) -> None:
        report = send(self.scheme, self.on_worker_error)
        self.logger.record("weight_sync/version", self.scheme.version)
        if report is not None:
            self.logger.record("weight_sync/seconds", report.seconds)
