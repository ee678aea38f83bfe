"""Policies that act on TensorDicts, and value networks."""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, distributions, nn
from torch.nn import functional
from typing_extensions import override

from collectors.environments.specs import ACTION_MASK, Array, Spec
from collectors.rollouts.sampled import Act, SampledPolicy
from learning.encoders import MLP, Observation
from learning.normalization import ObservationNormalizer, normalized


class Network(nn.Module):
    """A normalizer of observations, a trunk, which maps them to features ``[*B, F]``, and a head for the outputs.

    Several networks may share one trunk.
    """

    trunk: Any  # a module, or a `RecurrentNetwork`

    def __init__(self, trunk: nn.Module, head: nn.Module, normalizer: ObservationNormalizer | None = None) -> None:
        super().__init__()
        self.normalizer = normalizer or nn.Identity()
        self.trunk, self.head = trunk, head

    def features(self, observation: Observation) -> Tensor:
        """Return the features, which networks with the same trunk and normalizer share."""
        return self.trunk(self.normalizer(observation))

    def forward(self, observation: Observation) -> Tensor:
        return self.head(self.features(observation))


Operations = list[tuple[Callable[..., Array], tuple[Tensor, ...]]]  # functions, and the tensors that each takes
_SMALL = 2**18  # multiplications in a layer; with more, numpy's BLAS may use all cores, and torch is as fast
_FUNCTIONS: Any = {nn.Tanh: np.tanh, nn.ReLU: lambda x: np.maximum(x, 0)}


def operations_of(module: nn.Module) -> Operations | None:
    """Return what `module` computes, as operations of numpy; None if it has hooks, or one of its modules is not known.

    In a loop with an environment, a function of torch takes several times as long: the environment's step has emptied
    the processor's caches since the last one.
    """
    kind, parts = type(module), [part for part in module._modules.values() if part is not None]
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return None
    if isinstance(module, nn.Linear) and kind is nn.Linear and module.bias is not None:
        return [(lambda x, weight, bias: np.dot(x, weight.T) + bias, (module.weight, module.bias))]
    if isinstance(module, ObservationNormalizer) and kind is ObservationNormalizer and module.paths == [()]:
        return [(normalized, (module.moments[0].mean, module.moments[0].scale))]
    if kind not in (Network, MLP, nn.Sequential, nn.Identity):
        return [(_FUNCTIONS[kind], ())] if kind in _FUNCTIONS else None
    found = [operations_of(part) for part in parts]
    return None if None in found else [one for some in found for one in some or ()]


class Policy(SampledPolicy):
    """A distribution over actions with the output of a network as its parameters; a :class:`SampledPolicy`.

    The network maps observations ``[*B, *obs]`` to outputs ``[*B, N]``, one for each parameter. Where an observation
    has a part "action_mask", choices at which it is zero are not taken.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    @override
    def distribution_parameters(self, observation: Observation) -> Tensor:
        return self.to_parameters(self.network(observation), action_mask(observation))

    @abstractmethod
    def to_parameters(self, output: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the parameters of the distribution for the network's `output`; `mask` is the action mask, bool."""

    def operations(self) -> Operations | None:
        """Return operations that give the parameters at an observation, if there is no mask; None: not known."""
        return operations_of(self.network)

    @override
    def prepare(self, observation: Observation, noise: Tensor | None, on: torch.device) -> Act:
        parts = [getattr(self, name) for name in ("distribution_parameters", "to_parameters", "choose")]
        yours = any(inspect.unwrap(getattr(part, "__func__", part)).__module__ != __name__ for part in parts)
        known = self.operations() if isinstance(observation, Tensor) and not yours else None
        tensors = [one for _, some in known or () for one in some]
        forms = {(one.dtype, one.device.type, one.numel() * len(observation) <= _SMALL) for one in tensors}
        if known is None or forms - {(torch.float32, "cpu", True)}:
            return super().prepare(observation, noise, on)
        current, rows, memory, steps = observation.numpy(), None if noise is None else noise.numpy(), [], []
        choose: Any = self.choose

        def act(t: int) -> tuple[Array, Array]:
            nonlocal memory, steps
            if memory != (now := [one.data_ptr() for one in tensors]):  # a version is bound to its own memory
                memory, steps = now, [(function, [one.detach().numpy() for one in some]) for function, some in known]
            parameters: Any = current
            for function, arrays in steps:
                parameters = function(parameters, *arrays)
            return choose(parameters, None if rows is None else rows[t]), parameters

        return act

    def can_act(self, mask: Tensor) -> Tensor:
        """Return whether an action mask, bool ``[*B, N]``, leaves an action, ``[*B]``."""
        return mask.new_ones(mask.shape[:-1])

    @abstractmethod
    def from_parameters(self, parameters: Tensor) -> distributions.Distribution:
        """Return the distribution with these parameters ``[*B, P]``, batch shape ``[*B]``."""

    @override
    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        return self.from_parameters(parameters).log_prob(action)

    def distribution(self, observation: Observation) -> distributions.Distribution:
        """Return the distribution of actions at `observation` ``[*B, *obs]``, batch shape ``[*B]``."""
        return self.from_parameters(self.distribution_parameters(observation))


def action_mask(observation: Observation) -> Tensor | None:
    """Return the action mask of an observation, bool; None if it has none."""
    mask = observation.get(ACTION_MASK, None) if isinstance(observation, TensorDictBase) else None
    return None if mask is None else mask != 0


class CategoricalPolicy(Policy):
    """A policy over n choices; ``action`` is an int64 index, ``[*B]``. Its parameters are scores, ``[*B, n]``."""

    @override
    def to_parameters(self, output: Tensor, mask: Tensor | None = None) -> Tensor:
        return output if mask is None else output.masked_fill(~mask, torch.finfo(output.dtype).min)

    @override
    def can_act(self, mask: Tensor) -> Tensor:
        return mask.any(-1)

    def noise(self, parameters: Tensor, *steps: int) -> Tensor:
        """Draw Gumbel noise, -log(-log u)."""
        # At least float32: in a lower precision, the rounded sum would not follow the distribution of log_prob.
        dtype = torch.promote_types(parameters.dtype, torch.float32)
        uniform = parameters.new_empty((*steps, *parameters.shape), dtype=dtype).uniform_(torch.finfo(dtype).tiny, 1)
        return uniform.log_().neg_().log_().neg_()  # finite: a choice with a score of -inf is never taken

    def choose(self, parameters: Any, noise: Any) -> Any:
        """Choose by the Gumbel-max method, https://arxiv.org/abs/1611.01144."""
        return (parameters if noise is None else parameters + noise).argmax(-1)

    @override
    def from_parameters(self, parameters: Tensor) -> distributions.Distribution:
        return distributions.Categorical(logits=parameters, validate_args=False)


class MultiCategoricalPolicy(CategoricalPolicy):
    """A policy over several choices at once; ``action`` is int64 indices ``[*B, len(nvec)]``.

    Its parameters are the scores of the options of all choices, end to end, ``[*B, sum(nvec)]``; so is an action mask.
    `nvec` has the number of options of each choice.
    """

    def __init__(self, network: nn.Module, nvec: Sequence[int]) -> None:
        super().__init__(network)
        self.nvec = list(nvec)

    @override
    def can_act(self, mask: Tensor) -> Tensor:
        return self._by_choice(mask, False).any(-1).all(-1)

    @override
    def choose(self, parameters: Any, noise: Any) -> Any:
        scores = parameters if noise is None else parameters + noise
        ends = [*accumulate(self.nvec, initial=0)]
        kind: Any = torch if isinstance(scores, Tensor) else np
        return kind.stack([scores[..., begin:end].argmax(-1) for begin, end in pairwise(ends)], -1)

    @override
    def from_parameters(self, parameters: Tensor) -> distributions.Independent:
        choices = distributions.Categorical(logits=self._by_choice(parameters, -math.inf), validate_args=False)
        return distributions.Independent(choices, 1, validate_args=False)

    def _by_choice(self, options: Tensor, padding: float) -> Tensor:
        """Return the options of each choice as a row, ``[*B, len(nvec), max(nvec)]``, padded to the longest."""
        rows, longest = options.split(self.nvec, -1), max(self.nvec)
        return torch.stack([functional.pad(row, (0, longest - row.shape[-1]), value=padding) for row in rows], -2)


class GaussianPolicy(Policy):
    """A diagonal Gaussian over continuous actions; ``action`` is float32 ``[*B, dim]``.

    The network's output is the mean, in units of half the action range around its middle. The standard deviation is a
    parameter, the same for all observations. A sample may leave the range: the environment clips it, and its
    log-probability is that of the sample before clipping, as in Stable-Baselines3 and CleanRL. The parameters of the
    distribution are mean and standard deviation, in the environment's units, ``[*B, 2 * dim]``.

    Args:
        network: maps observations ``[*B, obs]`` to scaled means ``[*B, dim]``.
        low: lower bounds of the action, ``[dim]``. Where a range is infinite or empty, the scale is 1, the middle 0.
        high: upper bounds, ``[dim]``.
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

    @override
    def to_parameters(self, output: Tensor, mask: Tensor | None = None) -> Tensor:  # a mask has no meaning here
        return _mean_and_std(output, self.center, self.half_range, self.log_std)

    @override
    def operations(self) -> Operations | None:
        known = operations_of(self.network)
        return known and [*known, (_mean_and_std, (self.center, self.half_range, self.log_std))]

    @override
    def noise(self, parameters: Tensor, *steps: int) -> Tensor:
        return parameters.new_empty((*steps, *parameters.shape[:-1], parameters.shape[-1] // 2)).normal_()

    @override
    def choose(self, parameters: Any, noise: Any) -> Any:
        size = parameters.shape[-1] // 2
        mean, std = parameters[..., :size], parameters[..., size:]
        return mean if noise is None else mean + std * noise

    @override
    def from_parameters(self, parameters: Tensor) -> distributions.Independent:
        mean, std = parameters.chunk(2, -1)
        return distributions.Independent(distributions.Normal(mean, std, validate_args=False), 1, validate_args=False)


def _mean_and_std(output: Any, center: Any, half_range: Any, log_std: Any) -> Any:
    """Return a Gaussian's parameters, of tensors or of arrays."""
    kind: Any = torch if isinstance(output, Tensor) else np
    mean, std = center + half_range * output, half_range * kind.exp(log_std)
    return kind.concatenate([mean, std.expand_as(mean) if kind is torch else np.full_like(mean, std)], -1)


class Critic(nn.Module):
    """A value function: observations ``[*B, *obs]`` to values ``[*B]``, by a network that gives ``[*B, 1]``."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, observation: Observation) -> Tensor:
        return self.network(observation).squeeze(-1)


def evaluate(policy: Policy, critic: nn.Module, observation: Observation) -> tuple[distributions.Distribution, Tensor]:
    """Return the distribution of actions and the value at each observation; a shared network is called once."""
    actor, valuer = policy.network, getattr(critic, "network", None)
    if not isinstance(actor, Network) or not isinstance(valuer, Network) or actor.trunk is not valuer.trunk:
        return policy.distribution(observation), critic(observation)
    features = actor.features(observation)
    parameters = policy.to_parameters(actor.head(features), action_mask(observation))
    return policy.from_parameters(parameters), valuer.head(features).squeeze(-1)


def policy_for(
    action_spec: Spec, make_network: Callable[[int], nn.Module], initial_std: float = 1.0
) -> CategoricalPolicy | GaussianPolicy:
    """Return the policy that suits an environment's actions; raises ValueError for a continuous one without bounds.

    A spec with `n` gives a :class:`CategoricalPolicy`, one with `nvec` a :class:`MultiCategoricalPolicy`, and a
    continuous action a :class:`GaussianPolicy`. `make_network` makes the network for a given number of outputs.
    """
    if action_spec.nvec is not None:
        return MultiCategoricalPolicy(make_network(sum(action_spec.nvec)), action_spec.nvec)
    if not action_spec.dtype.is_floating_point:
        return CategoricalPolicy(make_network(action_spec.shape[-1]))
    if action_spec.low is None or action_spec.high is None:
        raise ValueError("a continuous action spec needs low and high")
    low, high = (bound.float().flatten() for bound in (action_spec.low, action_spec.high))
    return GaussianPolicy(make_network(len(low)), low, high, initial_std)
