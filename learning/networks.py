"""Policies that act on TensorDicts, and critics."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, distributions, nn

from collectors.rollouts.sampled import SampledPolicy
from learning.mlp import MLP

LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


class ActionSpec(Protocol):
    """What a policy must know of the actions it may take; an integer ``dtype`` says that they are discrete."""

    @property
    def shape(self) -> Sequence[int]:
        """``(n,)`` for n choices, ``(dim,)`` for a continuous action."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """A floating one for continuous actions."""
        ...

    @property
    def low(self) -> Tensor | float | None:
        """Lower bounds of a continuous action, ``[dim]``."""
        ...

    @property
    def high(self) -> Tensor | float | None:
        """Upper bounds of a continuous action, ``[dim]``."""
        ...


class Policy(SampledPolicy):
    """A distribution over actions that a network gives the parameters of; see :class:`SampledPolicy`."""

    def __init__(self, network: nn.Module) -> None:
        """Wrap `network`, which maps observations ``[*B, obs]`` to what the distribution depends on."""
        super().__init__()
        self.network = network

    @abstractmethod
    def distribution(self, observation: Tensor) -> distributions.Distribution:
        """Return the distribution of actions at `observation` ``[*B, obs]``."""

    @abstractmethod
    def log_prob_and_entropy(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability of `action` and the entropy at `observation`, both ``[*B]``, in nats."""


class CategoricalPolicy(Policy):
    """A policy over n choices; ``action`` is an int64 index, ``[*B]``. Its parameters are scores, ``[*B, n]``."""

    def distribution_parameters(self, observation: Tensor) -> Tensor:
        """See SampledPolicy."""
        return self.network(observation)

    def noise(self, parameters: Tensor, *steps: int) -> Tensor:
        """See SampledPolicy: Gumbel noise, -log(-log u); in half the time of ``exponential_``."""
        # In float32 at least: what is added to it is rounded as it is, and would not be what log_prob is told.
        dtype = torch.promote_types(parameters.dtype, torch.float32)
        uniform = parameters.new_empty((*steps, *parameters.shape), dtype=dtype).uniform_(torch.finfo(dtype).tiny, 1)
        return uniform.log_().neg_().log_().neg_()  # finite: a choice whose score is -inf is never taken

    def choose(self, parameters: Tensor, noise: Tensor | None) -> Tensor:
        """See SampledPolicy: Gumbel-max, https://arxiv.org/abs/1611.01144, in a quarter of multinomial's time."""
        return (parameters if noise is None else parameters + noise).argmax(-1)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """See SampledPolicy."""
        return _of_choice(parameters.log_softmax(-1), action)

    def distribution(self, observation: Tensor) -> distributions.Categorical:
        """Return the distribution over the n choices at `observation` ``[*B, obs]``."""
        return distributions.Categorical(logits=self.network(observation), validate_args=False)

    def log_prob_and_entropy(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability of `action` ``[*B]`` and the entropy at `observation`, both ``[*B]``, in nats."""
        log_probs = self.network(observation).log_softmax(-1)
        return _of_choice(log_probs, action), -(log_probs.exp() * log_probs).sum(-1)


def _of_choice(log_probs: Tensor, action: Tensor) -> Tensor:
    return log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)


class GaussianPolicy(Policy):
    """A diagonal Gaussian over continuous actions; ``action`` is float32 ``[*B, dim]``.

    The network's output is in units of half the action range, around its middle; the spread is learnt, and the same for
    all observations. A sample may leave the range: the environment clips it, and its log-probability is that before the
    clip, as in https://arxiv.org/abs/1707.06347. The parameters are mean and standard deviation, in the environment's
    units, ``[*B, 2 * dim]``.
    """

    center: Tensor
    half_range: Tensor

    def __init__(self, network: nn.Module, low: Tensor, high: Tensor, initial_std: float = 1.0) -> None:
        """Make a policy over the box from `low` to `high`, ``[dim]`` each; an infinite or empty range is no scale."""
        super().__init__(network)
        bounded = (high - low).isfinite() & (low < high)  # a spread of 0, where both are equal, has no density
        self.register_buffer("center", torch.where(bounded, low / 2 + high / 2, 0.0))
        self.register_buffer("half_range", torch.where(bounded, (high - low) / 2, 1.0))
        self.log_std = nn.Parameter(torch.full_like(self.center, math.log(initial_std)))

    def distribution_parameters(self, observation: Tensor) -> Tensor:
        """See SampledPolicy."""
        return torch.cat(self._mean_and_std(observation), -1)

    def _mean_and_std(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        mean = torch.addcmul(self.center, self.half_range, self.network(observation))
        return mean, (self.half_range * self.log_std.exp()).expand_as(mean)

    def noise(self, parameters: Tensor, *steps: int) -> Tensor:
        """See SampledPolicy: standard normal, ``[*steps, *B, dim]``."""
        mean, _ = parameters.chunk(2, -1)
        return mean.new_empty((*steps, *mean.shape)).normal_()

    def choose(self, parameters: Tensor, noise: Tensor | None) -> Tensor:
        """See SampledPolicy."""
        mean, std = parameters.chunk(2, -1)
        return mean if noise is None else torch.addcmul(mean, std, noise)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """See SampledPolicy."""
        mean, std = parameters.chunk(2, -1)
        return _log_density(mean, std, action)

    def distribution(self, observation: Tensor) -> distributions.Independent:
        """Return the Gaussian over actions at `observation` ``[*B, obs]``, in the environment's units."""
        mean, std = self._mean_and_std(observation)
        return distributions.Independent(distributions.Normal(mean, std, validate_args=False), 1, validate_args=False)

    def log_prob_and_entropy(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-density of `action` ``[*B, dim]`` and the entropy at `observation`, both ``[*B]``, in nats."""
        mean, std = self._mean_and_std(observation)
        return _log_density(mean, std, action), (std.log() + LOG_SQRT_2PI + 0.5).sum(-1)


def _log_density(mean: Tensor, std: Tensor, action: Tensor) -> Tensor:
    """Return the density of `action` under independent normal distributions, ``[*B, dim]`` to ``[*B]``, in nats."""
    return -(0.5 * ((action - mean) / std).square() + std.log() + LOG_SQRT_2PI).sum(-1)


class Critic(MLP):
    """A value function: observations ``[*B, obs]`` to values ``[*B]``."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the value of each observation of `input`."""
        return super().forward(input).squeeze(-1)


def make_policy(
    observation_dim: int,
    action_spec: ActionSpec,
    hidden: Sequence[int] = (64, 64),
    activation: str = "tanh",
    initial_std: float = 1.0,
) -> Policy:
    """Make a policy network for an environment's actions.

    Args:
        observation_dim: length of a flat observation.
        action_spec: the environment's; a floating dtype gives a :class:`GaussianPolicy`, another a
            :class:`CategoricalPolicy`.
        hidden: widths of the hidden layers.
        activation: one of ``tanh``, ``relu``, ``elu``, ``silu``.
        initial_std: spread of a continuous policy at the start, in units of half the action range.

    Raises:
        ValueError: an unknown `activation`, a continuous action without bounds, or one that is no vector.

    """
    if len(action_spec.shape) != 1:
        raise ValueError(f"a policy gives a choice or a vector, not an action of shape {list(action_spec.shape)}")
    network = MLP([observation_dim, *hidden, action_spec.shape[-1]], activation, last_gain=0.01)
    if not action_spec.dtype.is_floating_point:
        return CategoricalPolicy(network)
    if action_spec.low is None or action_spec.high is None:
        raise ValueError("a continuous action spec needs low and high")
    bounds = (action_spec.low, action_spec.high)
    low, high = (torch.as_tensor(b, dtype=torch.float32).expand(tuple(action_spec.shape)) for b in bounds)
    return GaussianPolicy(network, low, high, initial_std)


def make_critic(observation_dim: int, hidden: Sequence[int] = (64, 64), activation: str = "tanh") -> Critic:
    """Make a value network, observations ``[*B, observation_dim]`` to values ``[*B]``; see :func:`make_policy`."""
    return Critic([observation_dim, *hidden, 1], activation)
