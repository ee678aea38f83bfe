"""Policies: one that acts in parts, so that a step is one forward pass and one choice; and bare modules as policies."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import InteractionType, TensorDictModule, TensorDictModuleBase
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor, device, nn

from collectors.environments.specs import Array, to_numpy

Call = Callable[[TensorDictBase], Any]
Act = Callable[[int], tuple[Array, Array]]


class SampledPolicy(TensorDictModuleBase, ABC):
    """A distribution over actions: reads ``observation`` ``[*B, *obs]``, writes ``action`` and ``action_log_prob``.

    It samples, unless ``tensordict.nn.set_interaction_type(InteractionType.DETERMINISTIC)`` (or ``MODE``, ``MEAN``)
    asks for the most likely action. The caller decides about gradients: acting belongs under ``torch.no_grad()``.

    Subclasses define the four parts, and ``forward`` combines them. Collectors call the parts instead: noise and
    log-probabilities once in a batch. A policy that overrides ``forward``, or has hooks, is called like any other.
    """

    def __init__(self) -> None:
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
        """Return the parameters of the distribution at `observation` ``[*B, *obs]``, ``[*B, P]``.

        The environment of a collector overwrites the memory of `observation`: copy what is kept.
        """

    @abstractmethod
    def noise(self, parameters: Tensor, *steps: int) -> Tensor:
        """Draw the noise for `choose`, ``[*steps, *B, N]``; the values of `parameters` ``[*B, P]`` are not used."""

    @abstractmethod
    def choose(self, parameters: Tensor, noise: Tensor | None) -> Tensor:
        """Return an action for each row of `parameters` ``[*B, P]``; without noise ``[*B, N]``, the most likely one."""

    def prepare(self, observation: Any, noise: Tensor | None, on: device) -> Act:
        """Return a function of a step of the next batch: it gives what `choose` does there, and its parameters.

        A collector calls this once in a batch. Yours may keep tensors of the module, which get the weights of versions.

        Args:
            observation: a tensor, or a TensorDict, on the CPU; each step is written to this memory.
            noise: of all steps, ``[T, *B, N]``; None to choose the most likely actions.
            on: the device of the module.
        """
        rows = None if noise is None else noise.unbind()

        def act(t: int) -> tuple[Array, Array]:
            parameters = self.distribution_parameters(observation.to(on))
            action = self.choose(parameters, None if rows is None else rows[t])
            return to_numpy(action), to_numpy(parameters)

        return act

    @abstractmethod
    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return the log-probability (or density) of each `action` that was chosen, ``[*B]``, in nats.

        It may depend only on its arguments: the weights may have changed since.
        """


def greedy() -> bool:
    """Whether the interaction type asks for the most likely action."""
    return interaction_type() in (InteractionType.DETERMINISTIC, InteractionType.MODE, InteractionType.MEAN)


def acts_in_parts(policy: object) -> bool:
    """Whether calling the parts of `policy` is equivalent to calling it."""
    return (
        isinstance(policy, SampledPolicy)
        and inspect.unwrap(type(policy).forward) is SampledPolicy.forward  # the gate wraps it
        and "forward" not in vars(policy)
        and inspect.unwrap(type(policy).__call__) is inspect.unwrap(SampledPolicy.__call__)
        and not (policy._forward_hooks or policy._forward_pre_hooks)
        and policy._compiled_call_impl is None
    )


def check_policy(policy: Any) -> None:
    """Raise TypeError if ``policy`` cannot be called with one argument, a TensorDict or (a module) a tensor."""
    if policy is None:
        return
    if not callable(policy):
        raise TypeError(f"a policy is a module, or a function of a TensorDict, not a {type(policy).__name__}")
    try:
        signature = inspect.signature(policy.forward if isinstance(policy, nn.Module) else policy)
    except (TypeError, ValueError):  # it has none that Python can read
        return
    try:
        signature.bind(None)
    except TypeError as error:
        kind = type(policy).__name__
        raise TypeError(
            f"{kind}{signature} cannot be called with one argument, the observation ({error}): wrap it so that it "
            f'reads "observation" and writes "action", as TensorDictModule({kind}(…), ["observation"], ["action"]) does'
        ) from error


def as_policy(policy: Call) -> Call:
    """Return a function of a TensorDict: a module of tensors is wrapped in a ``TensorDictModule``.

    A module takes a TensorDict if it is of ``tensordict.nn``, has ``in_keys`` and ``out_keys``, or declares its
    argument as one (by a type, or the name "tensordict" or "td").
    """
    if not isinstance(policy, nn.Module) or _takes_tensordict(policy):
        return policy
    return TensorDictModule(policy, in_keys=["observation"], out_keys=["action"])


def _takes_tensordict(policy: nn.Module) -> bool:
    if isinstance(policy, TensorDictModuleBase) or {"in_keys", "out_keys"} <= set(dir(policy)):
        return True
    try:
        first = next(iter(inspect.signature(policy.forward).parameters.values()), None)
    except (TypeError, ValueError):  # it has no signature that Python can read
        return False
    return first is not None and (first.name in ("tensordict", "td") or "TensorDict" in str(first.annotation))
