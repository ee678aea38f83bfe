"""Transforms of an environment: a module that computes its rewards."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

import wsync
from collectors.environments.specs import Array, to_numpy

Key = str | Sequence[str]
"""A key of a step's TensorDict: "observation", or ("next", "reward")."""

OBSERVATION, ACTION = "observation", "action"
NEXT_OBSERVATION, REWARD = ("next", "observation"), ("next", "reward")
_READABLE = (OBSERVATION, ACTION, NEXT_OBSERVATION, REWARD)


@contextmanager
def without_side_effects(function: object, device: torch.device | str = "cpu") -> Iterator[None]:
    """Restore the random number generators at the end; a module ``function`` is in evaluation mode inside."""
    drawing = torch.device(device)
    training = [part for part in function.modules() if part.training] if isinstance(function, nn.Module) else []
    numpys, pythons = np.random.get_state(), random.getstate()
    with torch.random.fork_rng([drawing] if drawing.type == "cuda" else []):
        try:
            for part in training:
                part.training = False
            yield
        finally:
            for part in training:
                part.training = True
            np.random.set_state(numpys)
            random.setstate(pythons)


class Transform(ABC):
    """Replaces the rewards of an environment by a function of arrays ``[E, *]`` (a module gets float32).

    It reads any of "observation" ``[E, *obs]``, "action" ``[E, n]`` (a choice as one-hot) or ``[E, *shape]`` (clipped
    to the bounds), ("next", "observation") ``[E, *obs]`` and ("next", "reward") ``[E, 1]`` (of the transform before),
    in the order of ``in_keys``, and writes ("next", "reward") ``[E]`` or ``[E, 1]``. It is called once per step.

    Args:
        in_keys: inputs of the function.
        out_keys: ``[("next", "reward")]``.

    Raises:
        ValueError: there is no key, or an unknown one.
    """

    def __init__(self, in_keys: Sequence[Key], out_keys: Sequence[Key]) -> None:
        self.in_keys, self.out_keys = _keys("in_keys", in_keys, _READABLE), _keys("out_keys", out_keys, (REWARD,))

    @abstractmethod
    def evaluate(self, *inputs: Array) -> Array:
        """Call the function, in every step, in the acting thread."""


class ModuleTransform(Transform):
    """A transform with a module in the environment's own process as its function.

    A scheme of a collector can synchronise it like the policy, as the model ``"env.transform[0].module"``. The
    environment calls this object itself: in the trainer's process, pass a copy of the module that is trained.

    Args:
        module: takes the tensors of ``in_keys``, gives one tensor.
        in_keys: see ``Transform``.
        out_keys: see ``Transform``.
        device: device of the module and its input; by default the module stays and the input is on the CPU.
    """

    def __init__(
        self,
        module: nn.Module,
        in_keys: Sequence[Key],
        out_keys: Sequence[Key],
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(in_keys, out_keys)
        self.device = torch.device("cpu" if device is None else device)
        self.module = module if device is None else module.to(self.device)

    def evaluate(self, *inputs: Array) -> Array:
        """Call the module, without gradients."""
        return call(self.module, inputs, self.device)

    def __str__(self) -> str:
        return f"ModuleTransform({type(self.module).__name__})"


@wsync.gated
def call(module: nn.Module, inputs: Sequence[Array], device: torch.device | str = "cpu") -> Array:
    """Return the output of ``module`` for arrays, which it gets as new float32 tensors; without gradients."""
    with torch.no_grad():
        output = module(*(torch.tensor(one, dtype=torch.float32, device=device) for one in inputs))
    if not isinstance(output, torch.Tensor):
        raise TypeError(f"{type(module).__name__} gave a {type(output).__name__}, not one tensor")
    return to_numpy(output).copy()  # inside the gate: it may be a view of the weights


def _keys(name: str, keys: Sequence[Key], allowed: Sequence[Key]) -> tuple[str | tuple[str, ...], ...]:
    if isinstance(keys, str):
        raise ValueError(f"{name} is a list of keys, not the string {keys!r}")
    normalised = tuple(key if isinstance(key, str) else tuple(key) for key in keys)
    unknown = [key for key in normalised if key not in allowed]
    if unknown or not normalised:
        known = ", ".join(map(repr, allowed))
        raise ValueError(f"{name}: {f'unknown key {unknown[0]!r}' if unknown else 'no key'}; there are {known}")
    return normalised
