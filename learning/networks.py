"""Policies that act on TensorDicts, and critics."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, TensorDictModuleBase
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor, distributions, nn

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}
GREEDY = (InteractionType.DETERMINISTIC, InteractionType.MODE, InteractionType.MEAN)
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


class Policy(TensorDictModuleBase, ABC):
    """A stochastic policy: reads ``observation`` ``[*B, obs]``, writes ``action`` and ``action_log_prob`` ``[*B]``.

    It samples, unless ``tensordict.nn.set_interaction_type(InteractionType.DETERMINISTIC)`` (or ``MODE``) asks for the
    most likely action. The caller decides about gradients: acting belongs under ``torch.no_grad()``.
    """

    def __init__(self, network: nn.Module) -> None:
        """Wrap `network`, which maps observations to the parameters of a distribution."""
        super().__init__()
        self.network = network
        self.in_keys = ["observation"]
        self.out_keys = ["action", "action_log_prob"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act on a batch of observations; returns the same `tensordict`."""
        output = self.network(tensordict.get("observation"))
        action, log_prob = self._act(output, greedy=interaction_type() in GREEDY)
        tensordict.set("action", action)
        tensordict.set("action_log_prob", log_prob)
        return tensordict

    @abstractmethod
    def distribution(self, observation: Tensor) -> distributions.Distribution:
        """Return the distribution of actions at `observation` ``[*B, obs]``."""

    @abstractmethod
    def log_prob_and_entropy(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability of `action` and the entropy at `observation`, both ``[*B]``, in nats."""

    @abstractmethod
    def _act(self, output: Tensor, greedy: bool) -> tuple[Tensor, Tensor]:
        """Return an action for each row of the network's `output`, and its log-probability."""


class CategoricalPolicy(Policy):
    """A policy over n choices; ``action`` is an int64 index, ``[*B]``."""

    def _act(self, output: Tensor, greedy: bool) -> tuple[Tensor, Tensor]:
        log_probs = output.log_softmax(-1)
        # Gumbel-max, https://arxiv.org/abs/1611.01144: minus the log of an exponential is Gumbel noise.
        # It takes a quarter of multinomial's time.
        scores = log_probs if greedy else log_probs - torch.empty_like(log_probs).exponential_().log_()
        action = scores.argmax(-1)
        return action, log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def distribution(self, observation: Tensor) -> distributions.Categorical:
        """Return the distribution over the n choices at `observation` ``[*B, obs]``."""
        return distributions.Categorical(logits=self.network(observation), validate_args=False)

    def log_prob_and_entropy(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability of `action` ``[*B]`` and the entropy at `observation`, both ``[*B]``, in nats."""
        log_probs = self.network(observation).log_softmax(-1)
        log_prob = log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return log_prob, -(log_probs.exp() * log_probs).sum(-1)


class GaussianPolicy(Policy):
    """A diagonal Gaussian over continuous actions; ``action`` is float32 ``[*B, dim]``.

    The network's output is in units of half the action range, around its middle; the spread is learnt, and the same for
    all observations. A sample may leave the range: the environment clips it, and its log-probability is that before the
    clip, as in https://arxiv.org/abs/1707.06347.
    """

    center: Tensor
    half_range: Tensor

    def __init__(self, network: nn.Module, low: Tensor, high: Tensor, initial_std: float = 1.0) -> None:
        """Make a policy over the box from `low` to `high`, ``[dim]`` each; infinite bounds count as no scale."""
        super().__init__(network)
        bounded = low.isfinite() & high.isfinite()
        self.register_buffer("center", torch.where(bounded, (low + high) / 2, 0.0))
        self.register_buffer("half_range", torch.where(bounded, (high - low) / 2, 1.0))
        self.log_std = nn.Parameter(torch.full_like(self.center, math.log(initial_std)))

    def _act(self, output: Tensor, greedy: bool) -> tuple[Tensor, Tensor]:
        noise = torch.zeros_like(output) if greedy else torch.randn_like(output)
        action = self.center + self.half_range * (output + self.log_std.exp() * noise)
        return action, self._log_density(noise)

    def _log_density(self, noise: Tensor) -> Tensor:
        """Return the log-density of the sample that came of standard normal `noise`, ``[*B, dim]`` to ``[*B]``."""
        return -0.5 * noise.square().sum(-1) - self._log_scale()

    def _log_scale(self) -> Tensor:
        return (self.log_std + self.half_range.log() + LOG_SQRT_2PI).sum()

    def distribution(self, observation: Tensor) -> distributions.Independent:
        """Return the Gaussian over actions at `observation` ``[*B, obs]``, in the environment's units."""
        mean = self.center + self.half_range * self.network(observation)
        std = (self.half_range * self.log_std.exp()).expand_as(mean)
        return distributions.Independent(distributions.Normal(mean, std, validate_args=False), 1, validate_args=False)

    def log_prob_and_entropy(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-density of `action` ``[*B, dim]`` and the entropy at `observation`, both ``[*B]``, in nats."""
        noise = ((action - self.center) / self.half_range - self.network(observation)) * (-self.log_std).exp()
        entropy = self._log_scale() + 0.5 * noise.shape[-1]
        return self._log_density(noise), entropy.expand(noise.shape[:-1])


class Critic(nn.Sequential):
    """A value function: observations ``[*B, obs]`` to values ``[*B]``."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the value of each observation of `input`."""
        return super().forward(input).squeeze(-1)


def _layers(sizes: Sequence[int], activation: str, last_gain: float) -> list[nn.Module]:
    """Make linear layers with activations between; orthogonal init, https://arxiv.org/abs/1312.6120."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}: one of {', '.join(ACTIVATIONS)}")
    layers: list[nn.Module] = []
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.orthogonal_(linear.weight, last_gain if i == len(sizes) - 2 else math.sqrt(2.0))
        nn.init.zeros_(linear.bias)
        layers += [linear, ACTIVATIONS[activation]()]
    return layers[:-1]


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
        ValueError: an unknown `activation`, or a continuous action without bounds.

    """
    network = nn.Sequential(*_layers([observation_dim, *hidden, action_spec.shape[-1]], activation, last_gain=0.01))
    if not action_spec.dtype.is_floating_point:
        return CategoricalPolicy(network)
    if action_spec.low is None or action_spec.high is None:
        raise ValueError("a continuous action spec needs low and high")
    bounds = (action_spec.low, action_spec.high)
    low, high = (torch.as_tensor(b, dtype=torch.float32).expand(tuple(action_spec.shape)) for b in bounds)
    return GaussianPolicy(network, low, high, initial_std)


def make_critic(observation_dim: int, hidden: Sequence[int] = (64, 64), activation: str = "tanh") -> Critic:
    """Make a value network, observations ``[*B, observation_dim]`` to values ``[*B]``; see :func:`make_policy`."""
    return Critic(*_layers([observation_dim, *hidden, 1], activation, last_gain=1.0))
