"""Stable-Baselines3: a callback that sends the policy of any of its algorithms."""

from __future__ import annotations

from stable_baselines3.common.callbacks import BaseCallback  # pyright: ignore[reportMissingImports]

import wsync


class WsyncCallback(BaseCallback):
    """Sends the policy after each ``every``-th round of gradient steps, and when training ends.

    ``scheme`` is initialised with ``model.policy``, and has connected. Version, age and cost are logged as
    ``weight_sync/…``. What ``scheme.send`` raises ends the training.
    """

    def __init__(self, scheme: wsync.WeightSyncScheme, every: int = 1) -> None:
        super().__init__()
        self.scheme, self.every, self._rollouts = scheme, every, 0

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:  # each but the first follows gradient steps
        if self._rollouts and self._rollouts % self.every == 0:
            self._send()
        self._rollouts += 1

    def _on_training_end(self) -> None:
        self._send()

    def _send(self) -> None:
        report = self.scheme.send()
        self.logger.record("weight_sync/version", self.scheme.version)
        if report is not None:
            self.logger.record("weight_sync/seconds", report.seconds)
