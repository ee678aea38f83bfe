"""Models whose outputs tell which weights they were computed with."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

_OBSERVATIONS, _ACTIONS = 4, 2  # CartPole's


def usual_tensors(mib: float) -> int:
    """How many tensors a model of ``mib`` MiB is taken to have."""
    return 4 if mib <= 0.25 else 20 if mib <= 8 else 100


class Revealing(nn.Module):
    """Some tensors, and a forward that says what is in them.

    Args:
        mib: MiB of all weights together.
        tensors: how many, all of one size.
        value: of all weights at first. They are written, so that their memory is there.
    """

    def __init__(self, mib: float, tensors: int, value: float) -> None:
        super().__init__()
        numel = max(1, int(mib * 2**20 / 4 / tensors))
        self.weights = nn.ParameterList(nn.Parameter(torch.full((numel,), value)) for _ in range(tensors))

    def forward(self, whole: bool = True) -> Tensor:
        """The smallest and the largest weight, or (if not ``whole``) of each tensor's first: ``float32[2]``."""
        with torch.no_grad():
            return extremes(self.weights if whole else [weight[:1] for weight in self.weights])


class RevealingNetwork(nn.Module):
    """An MLP with tanh that acts in CartPole, and says what its weights are.

    Args:
        mib: MiB of all weights together, nearly.
        tensors: how many, weights and biases: an even number, 6 or more.
    """

    def __init__(self, mib: float, tensors: int) -> None:
        super().__init__()
        width, hidden = _width(mib, tensors // 2), tensors // 2 - 1
        sizes = [_OBSERVATIONS, *[width] * hidden, _ACTIONS]
        layers = [nn.Linear(sizes[i], sizes[i + 1]) for i in range(len(sizes) - 1)]
        self.layers = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The action (an index), the extremes of all weights (``float32[2]``), and this process."""
        with torch.no_grad():
            return self.layers(observation).argmax(-1), extremes(self.parameters()), torch.tensor(os.getpid())


def revealing_policy(mib: float, tensors: int) -> TensorDictModule:
    """A policy that writes "action", "reveal" and "process", for any collector."""
    return TensorDictModule(RevealingNetwork(mib, tensors), ["observation"], ["action", "reveal", "process"])


def extremes(weights: Iterable[Tensor]) -> Tensor:
    """The smallest and the largest of all ``weights``: ``float32[2]``."""
    found = [torch.stack(torch.aminmax(weight)) for weight in weights]
    stacked = torch.stack(found)
    return torch.stack([stacked[:, 0].min(), stacked[:, 1].max()])


@torch.no_grad()
def become(module: nn.Module, value: float) -> None:
    """Fill every weight with ``value``."""
    for parameter in module.parameters():
        parameter.fill_(value)


def _width(mib: float, layers: int) -> int:
    """The width at which ``layers`` layers have ``mib`` MiB: the root of their number of weights, a square in it."""
    square, linear = layers - 2, _OBSERVATIONS + _ACTIONS + layers - 1
    rest = _ACTIONS - mib * 2**18
    return max(1, round((-linear + math.sqrt(linear**2 - 4 * square * rest)) / (2 * square)))
