"""Policies that act on TensorDicts, and value networks."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, distributions, nn

from collectors.rollouts.sampled import SampledPolicy

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}


class ActionSpec(Protocol):
    """The shape, dtype and bounds of one environment's action; an integer ``dtype`` means a discrete action."""

    @property
    def shape(self) -> Sequence[int]:
        """``(n,)`` for n choices, ``(dim,)`` for a continuous action."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Floating for continuous actions, integer for discrete ones."""
        ...

    @property
    def low(self) -> Tensor | float | None:
        """Lower bounds of a continuous action, ``[dim]``."""
        ...

    @property
    def high(self) -> Tensor | float | None:
        """Upper bounds of a continuous action, ``[dim]``."""
        ...


def mlp(sizes: Sequence[int], activation: str = "tanh", last_gain: float = 1.0) -> nn.Sequential:
    """Return linear layers with activations between them: ``[*B, sizes[0]]`` to ``[*B, sizes[-1]]``.

    Weights are orthogonal (https://arxiv.org/abs/1312.6120) with a gain of the square root of 2; biases are zero.

    Args:
        sizes: widths of the input, the hidden layers and the output.
        activation: one of ``tanh``, ``relu``, ``elu``, ``silu``.
        last_gain: gain of the last layer's weight.

    Raises:
        ValueError: an unknown `activation`.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}: one of {', '.join(ACTIVATIONS)}")
    gains = [math.sqrt(2.0)] * (len(sizes) - 2) + [last_gain]
    layers: list[nn.Module] = []
    for (fan_in, fan_out), gain in zip(pairwise(sizes), gains, strict=True):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.orthogonal_(linear.weight, gain)
        nn.init.zeros_(linear.bias)
        layers += [linear, ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1])


class Policy(SampledPolicy):
    """A distribution over actions with the output of a network as its parameters; see :class:`SampledPolicy`.

    Args:
        network: maps observations ``[*B, obs]`` to the parameters of the distribution.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    @abstractmethod
    def distribution(self, observation: Tensor) -> distributions.Distribution:
        """Return the distribution of actions at `observation` ``[*B, obs]``, batch shape ``[*B]``."""


class CategoricalPolicy(Policy):
    """A policy over n choices; ``action`` is an int64 index, ``[*B]``. Its parameters are scores, ``[*B, n]``."""

    def distribution_parameters(self, observation: Tensor) -> Tensor:
        """See SampledPolicy."""
        return self.network(observation)

    def noise(self, parameters: Tensor, *steps: int) -> Tensor:
        """See SampledPolicy: Gumbel noise, -log(-log u)."""
        # At least float32: in a lower precision, the rounded sum would not follow the distribution of log_prob.
        dtype = torch.promote_types(parameters.dtype, torch.float32)
        uniform = parameters.new_empty((*steps, *parameters.shape), dtype=dtype).uniform_(torch.finfo(dtype).tiny, 1)
        return uniform.log_().neg_().log_().neg_()  # finite: a choice with a score of -inf is never taken

    def choose(self, parameters: Tensor, noise: Tensor | None) -> Tensor:
        """See SampledPolicy: the Gumbel-max method, https://arxiv.org/abs/1611.01144."""
        return (parameters if noise is None else parameters + noise).argmax(-1)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """See SampledPolicy."""
        return parameters.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def distribution(self, observation: Tensor) -> distributions.Categorical:
        """Return the distribution over the n choices at `observation` ``[*B, obs]``."""
        return distributions.Categorical(logits=self.network(observation), validate_args=False)


class GaussianPolicy(Policy):
    """A diagonal Gaussian over continuous actions; ``action`` is float32 ``[*B, dim]``.

    The network's output is the mean, in units of half the action range around its middle. The standard deviation is a
    parameter, the same for all observations. A sample may leave the range: the environment clips it, and its
    log-probability is that of the sample before clipping, as in https://arxiv.org/abs/1707.06347. The parameters of the
    distribution are mean and standard deviation, in the environment's units, ``[*B, 2 * dim]``.

    Args:
        network: maps observations ``[*B, obs]`` to scaled means ``[*B, dim]``.
        low: lower bounds of the action, ``[dim]``.
        high: upper bounds, ``[dim]``. Where a range is infinite or empty, the scale is 1 and the middle 0.
        initial_std: standard deviation at the start, in units of half the range.
    """

    center: Tensor
    half_range: Tensor

    def __init__(self, network: nn.Module, low: Tensor, high: Tensor, initial_std: float = 1.0) -> None:
        super().__init__(network)
        bounded = (high - low).isfinite() & (low < high)  # a standard deviation of 0 has no density
        self.register_buffer("center", torch.where(bounded, low / 2 + high / 2, 0.0))
        self.register_buffer("half_range", torch.where(bounded, (high - low) / 2, 1.0))
        self.log_std = nn.Parameter(torch.full_like(self.center, math.log(initial_std)))

    def distribution_parameters(self, observation: Tensor) -> Tensor:
        """See SampledPolicy."""
        mean = self.center + self.half_range * self.network(observation)
        return torch.cat([mean, (self.half_range * self.log_std.exp()).expand_as(mean)], -1)

    def noise(self, parameters: Tensor, *steps: int) -> Tensor:
        """See SampledPolicy: standard normal, ``[*steps, *B, dim]``."""
        *batch, size = parameters.shape
        return parameters.new_empty((*steps, *batch, size // 2)).normal_()

    def choose(self, parameters: Tensor, noise: Tensor | None) -> Tensor:
        """See SampledPolicy."""
        mean, std = parameters.chunk(2, -1)
        return mean if noise is None else mean + std * noise

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """See SampledPolicy."""
        return _normal(parameters).log_prob(action)

    def distribution(self, observation: Tensor) -> distributions.Independent:
        """Return the Gaussian over actions at `observation` ``[*B, obs]``, in the environment's units."""
        return _normal(self.distribution_parameters(observation))


def _normal(parameters: Tensor) -> distributions.Independent:
    """Return independent normal distributions for mean and standard deviation, ``[*B, 2 * dim]``."""
    mean, std = parameters.chunk(2, -1)
    return distributions.Independent(distributions.Normal(mean, std, validate_args=False), 1, validate_args=False)


class Critic(nn.Module):
    """A value function: observations ``[*B, obs]`` to values ``[*B]``.

    Args:
        network: observations ``[*B, obs]`` to ``[*B, 1]``.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, observation: Tensor) -> Tensor:
        """Return the value of each observation."""
        return self.network(observation).squeeze(-1)


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
        initial_std: standard deviation of a continuous policy at the start, in units of half the action range.

    Raises:
        ValueError: an unknown `activation`, a continuous action without bounds, or an action that is not a vector.

    """
    if len(action_spec.shape) != 1:
        raise ValueError(f"a policy gives a choice or a vector, not an action of shape {list(action_spec.shape)}")
    network = mlp([observation_dim, *hidden, action_spec.shape[-1]], activation, last_gain=0.01)
    if not action_spec.dtype.is_floating_point:
        return CategoricalPolicy(network)
    if action_spec.low is None or action_spec.high is None:
        raise ValueError("a continuous action spec needs low and high")
    bounds = (action_spec.low, action_spec.high)
    low, high = (torch.as_tensor(b, dtype=torch.float32).expand(tuple(action_spec.shape)) for b in bounds)
    return GaussianPolicy(network, low, high, initial_std)


def make_critic(observation_dim: int, hidden: Sequence[int] = (64, 64), activation: str = "tanh") -> Critic:
    """Make a value network, observations ``[*B, observation_dim]`` to values ``[*B]``; see :func:`make_policy`."""
    return Critic(mlp([observation_dim, *hidden, 1], activation))
