"""The acting part of a worker: an environment, a copy of the policy, and the rollout."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import wsync
from collectors.rollouts.rollout import Rollout


class Actor:
    """Acts with a policy and records the version that acted in each frame.

    It is also the context of a worker's schemes; model ids are ``"policy"``, ``"env.value_net"``, or a path below the
    policy.

    Args:
        env: a ``GymEnv``.
        policy: a module or a function of a TensorDict; None acts at random.
        device: device of the policy, if it is a module, and of its input.
        init_random_frames: the first frames have random actions.
        max_frames_per_traj: episodes are truncated after this many steps.
    """

    def __init__(
        self,
        env: Any,
        policy: Any,
        *,
        device: torch.device | str | None,
        init_random_frames: int,
        max_frames_per_traj: int | None,
    ) -> None:
        self.env = env
        self.policy = policy.to(device) if isinstance(policy, nn.Module) and device is not None else policy
        self._source: wsync.WeightSyncScheme | None = None
        self.rollout = Rollout(
            env,
            self.policy,
            device=device,
            version=self._version,
            gate=self._gated,
            init_random_frames=init_random_frames,
            max_frames_per_traj=max_frames_per_traj,
        )

    def follow(self, scheme: wsync.WeightSyncScheme) -> None:
        """Take ``policy_version`` from ``scheme``, which synchronises the policy."""
        self._source = scheme

    def _gated(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Run ``function`` inside the gate if a scheme is followed, so that weights and version match."""
        inside = wsync.gated(function)
        return lambda *arguments: (function if self._source is None else inside)(*arguments)

    def _version(self) -> int:
        return 0 if self._source is None else self._source.installed_version

    def get_model(self, model_id: str) -> nn.Module:
        """Return the model called ``model_id`` in this worker.

        Raises:
            LookupError: there is no such model.
        """
        return find_in(SimpleNamespace(policy=self.policy, env=self.env), self.policy, model_id)


def policy_scheme(schemes: dict[str, wsync.WeightSyncScheme]) -> wsync.WeightSyncScheme | None:
    """Return the scheme with ``policy_version`` as its version: the policy's, or else the first that sends weights."""
    carrying = {name: s for name, s in schemes.items() if not isinstance(s, wsync.NoWeightSyncScheme)}
    return carrying.get("policy") or next(iter(carrying.values()), None)


def find_in(context: object, policy: object, model_id: str) -> nn.Module:
    """Return the model ``model_id`` of a context, or else of the policy (``"actor"``).

    Raises:
        LookupError: it is in neither.
    """
    try:
        return wsync.find_model(context, model_id)
    except LookupError as error:
        if not isinstance(policy, nn.Module):
            raise
        try:
            return wsync.find_model(policy, model_id)
        except LookupError:
            raise error from None  # its message names the part of the path that exists
