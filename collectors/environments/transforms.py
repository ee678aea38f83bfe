"""Transforms of an environment: a module that encodes its observations, or gives its rewards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import nn

import wsync
from collectors.environments.probing import without_trace
from collectors.environments.specs import to_numpy
from collectors.environments.step_wrappers import EncodedSteps, RewardedSteps
from collectors.environments.stepper import Steps
from collectors.environments.vector import Array

Key = str | Sequence[str]
"""A key of a step's TensorDict: "observation", or ("next", "reward")."""

OBSERVATION, ACTION = "observation", "action"
NEXT_OBSERVATION, REWARD = ("next", "observation"), ("next", "reward")
_READABLE = (OBSERVATION, ACTION, NEXT_OBSERVATION, REWARD)


class Transform(ABC):
    """Changes what an environment gives, by a function of float32 arrays ``[E, *]``: one row per environment.

    It is an encoder, reading "observation" and writing "observation"; or a reward model, reading any of "observation"
    ``[E, *obs]``, "action" ``[E, n]`` (a choice as one-hot) or ``[E, *shape]`` (clipped to the bounds),
    ("next", "observation") ``[E, *obs]`` and ("next", "reward") ``[E, 1]``, in the order of ``in_keys``, and writing
    ("next", "reward") ``[E]`` or ``[E, 1]``. It reads what the environment's earlier transforms wrote.

    The function is called once per step with all environments; an encoder once more for the rows that begin anew, when
    some do, and for all rows at a reset.

    Args:
        in_keys: what the function reads.
        out_keys: what it writes.

    Raises:
        ValueError: unknown keys, or keys that do not go together.
    """

    def __init__(self, in_keys: Sequence[Key], out_keys: Sequence[Key]) -> None:
        self.in_keys, self.out_keys = _keys("in_keys", in_keys), _keys("out_keys", out_keys)
        if self.out_keys not in ((OBSERVATION,), (REWARD,)):
            raise ValueError(f'out_keys is ["observation"] or [("next", "reward")], not {list(self.out_keys)}')
        if self.is_encoder and self.in_keys != (OBSERVATION,):
            raise ValueError(
                f'what writes "observation" reads ["observation"] and nothing else, not {list(self.in_keys)}: '
                "a reset gives nothing else to read"
            )

    @property
    def is_encoder(self) -> bool:
        """Whether it writes observations; else it writes rewards."""
        return self.out_keys == (OBSERVATION,)

    @abstractmethod
    def evaluate(self, *inputs: Array) -> Array:
        """Call the function."""

    @abstractmethod
    def probe(self, *inputs: Array) -> Array:
        """Call it to see the shape of what it gives, leaving no trace."""

    def around(self, inner: Steps) -> Steps:
        """Return ``inner`` with this transform around it; see ``GymEnv.append_transform``."""
        if self.is_encoder:
            return EncodedSteps(inner, self.evaluate, self.probe, str(self))
        return RewardedSteps(inner, self.evaluate, self.probe, str(self), self.in_keys)


class ModuleTransform(Transform):
    """A transform whose function is a module in the environment's own process.

    A collector's workers can have it updated like their policy, as the model ``"env.transform[0].module"``. The
    environment calls this very object: an environment in the trainer's process wants a copy of what is trained.

    Args:
        module: takes the tensors of ``in_keys``, gives one tensor.
        in_keys: see ``Transform``.
        out_keys: see ``Transform``.
        device: where the module is put, and gets its input; by default it stays, and gets it on the CPU.

    Raises:
        ValueError: unknown keys, or keys that do not go together.
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

    def probe(self, *inputs: Array) -> Array:
        """Call the module in evaluation mode, and leave random numbers as they were."""
        return call_without_trace(self.module, inputs, self.device)

    def __str__(self) -> str:
        return f"ModuleTransform({type(self.module).__name__})"


@wsync.gated
def call(module: nn.Module, inputs: Sequence[Array], device: torch.device | str = "cpu") -> Array:
    """Return what ``module`` gives for arrays, as float32 tensors of its own; without gradients.

    What it gives may be a view of its weights: it is copied before the gate is left.

    Raises:
        TypeError: it gives no tensor.
    """
    with torch.no_grad():
        output = module(*(torch.tensor(one, dtype=torch.float32, device=device) for one in inputs))
    if not isinstance(output, torch.Tensor):
        raise TypeError(f"{type(module).__name__} gave a {type(output).__name__}, not one tensor")
    return to_numpy(output).copy()


def call_without_trace(module: nn.Module, inputs: Sequence[Array], device: torch.device | str = "cpu") -> Array:
    """``call``, with no statistics updated and no random numbers spent."""
    with without_trace(module, device):
        return call(module, inputs, device)


def _keys(name: str, keys: Sequence[Key]) -> tuple[str | tuple[str, ...], ...]:
    if isinstance(keys, str):
        raise ValueError(f"{name} is a list of keys, not the string {keys!r}")
    normalised = tuple(key if isinstance(key, str) else tuple(key) for key in keys)
    unknown = [key for key in normalised if key not in _READABLE]
    if unknown or not normalised:
        known = ", ".join(map(repr, _READABLE))
        raise ValueError(f"{name}: {f'unknown key {unknown[0]!r}' if unknown else 'no key'}; there are {known}")
    return normalised
