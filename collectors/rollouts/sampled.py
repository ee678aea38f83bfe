"""Policies that say in parts how they act, so that a rollout's step is one pass through a network and one choice."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod

from tensordict import TensorDictBase
from tensordict.nn import InteractionType, TensorDictModuleBase
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor

GREEDY = (InteractionType.DETERMINISTIC, InteractionType.MODE, InteractionType.MEAN)


class SampledPolicy(TensorDictModuleBase, ABC):
    """A distribution over actions: reads ``observation`` ``[*B, *obs]``, writes ``action`` and ``action_log_prob``.

    It samples, unless ``tensordict.nn.set_interaction_type(InteractionType.DETERMINISTIC)`` (or ``MODE``) asks for the
    most likely action. The caller decides about gradients: acting belongs under ``torch.no_grad()``.

    Subclasses say the four parts, and ``forward`` puts them together. Collectors do so themselves: they draw the noise
    for a whole batch, take parameters and a choice in each step, and compute the log-probabilities of a whole batch.
    A policy whose ``forward`` or ``__call__`` is another, or that has hooks, is called like any other.
    """

    def __init__(self) -> None:
        """Say the keys."""
        super().__init__()
        self.in_keys = ["observation"]
        self.out_keys = ["action", "action_log_prob"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act on a batch of observations; returns the same `tensordict`."""
        parameters = self.distribution_parameters(tensordict.get("observation"))
        action = self.choose(parameters, None if greedy() else self.noise(parameters))
        tensordict.set("action", action)
        tensordict.set("action_log_prob", self.log_prob(parameters, action))
        return tensordict

    @abstractmethod
    def distribution_parameters(self, observation: Tensor) -> Tensor:
        """Return all that the distribution at `observation` ``[*B, *obs]`` depends on, ``[*B, P]``.

        A collector's environment writes into the memory of `observation` again: copy what is to be kept.
        """

    @abstractmethod
    def noise(self, parameters: Tensor, *steps: int) -> Tensor:
        """Draw what `choose` needs ``[*steps, *B, N]``, for `parameters` ``[*B, P]`` of which only the form counts."""

    @abstractmethod
    def choose(self, parameters: Tensor, noise: Tensor | None) -> Tensor:
        """Return an action for each row of `parameters` ``[*B, P]``; without noise ``[*B, N]``, the most likely one."""

    @abstractmethod
    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return the log-probability (or density) of each `action` that was chosen, ``[*B]``, in nats.

        It depends on nothing but its arguments: the weights may be others by now.
        """


def greedy() -> bool:
    """Whether policies are to take the most likely action."""
    return interaction_type() in GREEDY


def says_its_parts(policy: object) -> bool:
    """Whether asking for a policy's parts is the same as calling it."""
    return (
        isinstance(policy, SampledPolicy)
        and type(policy).forward is SampledPolicy.forward
        and "forward" not in vars(policy)
        and inspect.unwrap(type(policy).__call__) is inspect.unwrap(SampledPolicy.__call__)  # the gate's is wrapped
        and not (policy._forward_hooks or policy._forward_pre_hooks)
        and policy._compiled_call_impl is None
    )
