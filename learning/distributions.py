"""Distributions over actions that torch does not have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution


class MultiCategorical(Distribution):
    """Independent choices among ``nvec[0]``, ``nvec[1]``, … options; a sample is int64 indices ``[*B, len(nvec)]``.

    Args:
        logits: scores of the options of all choices, end to end, ``[*B, sum(nvec)]``.
        nvec: number of options of each choice.
    """

    def __init__(self, logits: Tensor, nvec: Sequence[int]) -> None:
        super().__init__(logits.shape[:-1], torch.Size([len(nvec)]), validate_args=False)
        self.choices = [Categorical(logits=part, validate_args=False) for part in logits.split(list(nvec), -1)]

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return samples ``[*sample_shape, *B, len(nvec)]``."""
        return torch.stack([choice.sample(torch.Size(sample_shape)) for choice in self.choices], -1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability of `value` ``[*B, len(nvec)]``, in nats."""
        parts = zip(self.choices, value.unbind(-1), strict=True)
        return torch.stack([choice.log_prob(index) for choice, index in parts]).sum(0)

    def entropy(self) -> Tensor:
        """Return the entropy ``[*B]``, in nats."""
        return torch.stack([choice.entropy() for choice in self.choices]).sum(0)

    @property
    def mode(self) -> Tensor:
        """The most likely indices."""
        return torch.stack([choice.mode for choice in self.choices], -1)
