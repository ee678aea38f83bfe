"""The acting part of a worker: an environment, a copy of the policy, and the rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import wsync
from collectors.rollouts.rollout import Rollout


class Actor:
    """Acts with a policy and records the version that acted in each frame.

    It is also the context of a worker's schemes; model ids are ``"policy"``, ``"env.value_net"``, or a path in the
    policy (``"critic"``) or in the environment (``"transform[0].module"``).
    """

    def __init__(
        self,
        env: Any,
        policy: Any,
        scheme: wsync.WeightSyncScheme | None,
        *,
        device: torch.device | str | None,
        **limits: Any,
    ) -> None:
        self.env = env
        self.policy = policy.to(device) if isinstance(policy, nn.Module) and device is not None else policy
        if scheme is not None:  # the gate makes weights and version match
            limits |= {"version": lambda: scheme.installed_version, "gate": wsync.gated}
        self.rollout = Rollout(env, self.policy, device=device, **limits)

    def get_model(self, model_id: str) -> nn.Module:
        """Return the model called ``model_id`` in this worker."""
        return find_in(self._roots, model_id, wsync.find_model)

    def find(self, path: str) -> Any:
        """Return the object at ``path``, which begins as a model id does; raise LookupError if there is none."""
        return find_in(self._roots, path, wsync.find_object)

    @property
    def _roots(self) -> Mapping[str, object]:
        models = SimpleNamespace(policy=self.policy, env=self.env)  # "policy" and "env.…" are model ids
        return {"the collector": models, "its policy": self.policy, "its environment": self.env}


def policy_scheme(schemes: Mapping[str, wsync.WeightSyncScheme]) -> wsync.WeightSyncScheme | None:
    """Return the scheme with ``policy_version`` as its version: the policy's, or else the first that sends weights."""
    carrying = {name: scheme for name, scheme in schemes.items() if scheme.sends_weights}
    return carrying.get("policy") or next(iter(carrying.values()), None)


def find_in(roots: Mapping[str, object], path: str, find: Callable[[object, str], Any]) -> Any:
    """Return ``find(root, path)`` of the first of ``roots``, by name, that has ``path``."""
    misses: dict[str, wsync.NoSuchPath] = {}
    for name, root in roots.items():
        if root is not None:
            try:
                return find(root, path)
            except wsync.NoSuchPath as miss:
                misses[name] = miss
    furthest = max(len(miss.reached) for miss in misses.values())
    lacking = [
        f"in {name}, {miss.lacking}" if miss.reached else miss.lacking.replace("the context", name)
        for name, miss in misses.items()
        if len(miss.reached) == furthest
    ]
    raise LookupError(f"no '{path}' in this collector: {'; '.join(lacking)}")
