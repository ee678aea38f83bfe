"""Models with outputs that reveal which weights they were computed with, and an environment for them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn


def extremes(weights: Iterable[Tensor]) -> Tensor:
    """Return the smallest and the largest of all ``weights``: ``float32[2]``."""
    found = torch.stack([torch.stack(torch.aminmax(weight)) for weight in weights])
    return torch.stack([found[:, 0].min(), found[:, 1].max()])


@torch.no_grad()
def fill(module: nn.Module, value: float) -> None:
    """Fill every parameter and buffer with ``value``."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.fill_(value)


class RevealingModel(nn.Module):
    """Parameters of one size, ``mib`` MiB together, and a forward that returns the extremes of all weights."""

    idle = False  # a forward returns at once, to measure what a call costs

    def __init__(self, mib: float, tensors: int = 8, value: float = 1.0, *, buffer: bool = False) -> None:
        super().__init__()
        numel = max(1, int(mib * 2**20 / 4 / tensors))
        self.weights = nn.ParameterList(nn.Parameter(torch.full((numel,), value)) for _ in range(tensors))
        if buffer:
            self.register_buffer("mark", torch.full((1,), value))

    def forward(self) -> Tensor:
        """Return the extremes of all weights: ``float32[2]``."""
        with torch.no_grad():
            return self.weights[0] if self.idle else extremes((*self.weights, *self.buffers()))


class _Acting(RevealingModel):
    """Acts in one environment, always with 0; returns the action, the extremes and the process id."""

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.tensor(0), super().forward(), torch.tensor(os.getpid())


def revealing_policy(mib: float, tensors: int = 8, *, buffer: bool = False) -> TensorDictModule:
    """Return a policy that writes "action", "reveal" and "process", for any collector."""
    return TensorDictModule(_Acting(mib, tensors, buffer=buffer), ["observation"], ["action", "reveal", "process"])


class ConstantEnv(gymnasium.Env):
    """Its observation is what `value` ``[1]`` is at the time; an episode has no end."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, value: np.ndarray) -> None:
        self._value = value

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """See ``gymnasium.Env``."""
        super().reset(seed=seed)
        return np.array(self._value, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """See ``gymnasium.Env``."""
        return np.array(self._value, np.float32), 0.0, False, False, {}
