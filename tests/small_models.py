"""Models of several tests: workers import them by name."""

from typing import Any

import torch
from torch import nn

from wsync.testing.models import Small, fill


class TwoWeights(Small):
    """Two parameters, of which the first is the output."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.zeros(4))


class Wide(nn.Linear):
    """Large enough for a difference to be smaller, and for int8 to have a quarter of the bytes."""

    def __init__(self) -> None:
        super().__init__(256, 64)


class Scaled(nn.Module):
    """Multiplies by one weight, from 1 on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.weight * given


def scaled(value: float) -> Scaled:
    return fill(Scaled(), value)


def linear(value: float) -> nn.Linear:
    """Two inputs and two outputs; all parameters have this value."""
    return fill(nn.Linear(2, 2), value)


def policy_of(value: float) -> nn.Linear:
    """The same with four inputs."""
    return fill(nn.Linear(4, 2), value)


def make_trained() -> Any:
    """A trainer's model: three projections, and a head with its weight tied to that of the embedding."""
    model: Any = nn.ModuleDict({name: nn.Linear(16, 16) for name in "qkv"})
    model.embed, model.head = nn.Embedding(8, 16), nn.Linear(16, 8, bias=False)
    model.head.weight = model.embed.weight
    return model


def make_engine() -> nn.Module:
    """A worker's model for that: one fused projection, other names, bfloat16."""
    tokens, qkv = nn.Embedding(8, 16, dtype=torch.bfloat16), nn.Linear(16, 48, dtype=torch.bfloat16)
    return nn.ModuleDict({"tokens": tokens, "qkv": qkv})
