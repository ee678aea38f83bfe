"""Models with outputs that reveal which weights they were computed with, and an environment for them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

_OBSERVATIONS, _ACTIONS = 4, 2  # of CartPole


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
    """Parameters of one size, and a forward that returns their extremes.

    Args:
        mib: MiB of all parameters together.
        tensors: number of parameters.
        value: initial value of all parameters.
        buffer: whether there is a buffer as well, which is revealed, too.

    Attributes:
        idle: whether a forward returns at once, to measure what a call costs.
    """

    idle = False

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


class RevealingPolicy(RevealingModel):
    """Writes "action" (always 0), "reveal" (the extremes) and "process" for one environment."""

    def forward(self, observation: TensorDictBase) -> TensorDictBase:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Act on an observation; returns the same TensorDict."""
        observation.set("reveal", super().forward())
        observation.set("process", torch.tensor(os.getpid()))
        return observation.set("action", torch.tensor(0))


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


class RevealingNetwork(nn.Module):
    """A tanh MLP for CartPole that reveals its weights.

    Args:
        mib: approximate MiB of all parameters together.
        tensors: number of parameters, weights and biases: an even number, 6 or more.
    """

    def __init__(self, mib: float, tensors: int) -> None:
        super().__init__()
        width, hidden = _width(mib, tensors // 2), tensors // 2 - 1
        sizes = [_OBSERVATIONS, *[width] * hidden, _ACTIONS]
        layers = [nn.Linear(sizes[i], sizes[i + 1]) for i in range(len(sizes) - 1)]
        self.layers = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the action's index, the extremes of all weights (``float32[2]``), and the process id."""
        with torch.no_grad():
            return self.layers(observation).argmax(-1), extremes(self.parameters()), torch.tensor(os.getpid())


def cartpole_policy(mib: float, tensors: int) -> TensorDictModule:
    """Return a policy that writes "action", "reveal" and "process", for any collector."""
    return TensorDictModule(RevealingNetwork(mib, tensors), ["observation"], ["action", "reveal", "process"])


def _width(mib: float, layers: int) -> int:
    """Return the width at which ``layers`` layers have ``mib`` MiB: the root of a quadratic equation."""
    square, linear = layers - 2, _OBSERVATIONS + _ACTIONS + layers - 1
    rest = _ACTIONS - mib * 2**18
    return max(1, round((-linear + math.sqrt(linear**2 - 4 * square * rest)) / (2 * square)))
