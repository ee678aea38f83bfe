"""How a rollout comes by its actions: at random, by calling a policy, or by asking it for its parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

import wsync
from collectors.environments.probing import without_trace
from collectors.environments.specs import to_numpy
from collectors.environments.stepper import Steps
from collectors.rollouts.columns import Columns
from collectors.rollouts.sampled import SampledPolicy, greedy

Array = np.ndarray
Policy = Callable[[TensorDictBase], TensorDictBase]
Read = Callable[[torch.Tensor], Array]
Gate = Callable[[Callable[..., Any]], Callable[..., Any]]
NO_VERSION = -1
"""``policy_version`` of frames in which no policy acted (random ones)."""


def no_version() -> int:
    """Return the version of weights that nobody updates."""
    return 0


def no_gate(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function: its weights change only between two calls."""
    return function


class Asking(Protocol):
    """A way to come by actions; under ``torch.no_grad()``."""

    @property
    def outputs(self) -> Mapping[str, torch.Tensor]:
        """One output of each top-level key that is stored, for the environment's batch size."""
        ...

    def begin(self, steps: int) -> None:
        """So many steps of a batch are going to be asked for."""
        ...

    def act(self, columns: Columns, t: int) -> tuple[Array, int]:
        """Write actions on the current observation, and what else there is, to row ``t``; return them, and the version.

        What a policy gives may be a view of its weights, or of the observation: it is read before the gate is left.
        """
        ...

    def finish(self, columns: Columns, first: int) -> None:
        """The rows from ``first`` on are acted on; write what is left."""
        ...


class AtRandom:
    """Random actions. Log-probabilities are those of the uniform choice; what else a policy would write is 0."""

    def __init__(self, stepper: Steps, batched: bool) -> None:
        self._stepper = stepper
        spec = stepper.action_spec
        size = (stepper.num_envs,) if batched else ()
        self.outputs = {"action": torch.zeros(size if spec.is_discrete else (*size, *spec.shape), dtype=spec.dtype)}

    def begin(self, steps: int) -> None:
        """See Asking."""

    def act(self, columns: Columns, t: int) -> tuple[Array, int]:
        """See Asking."""
        action = self._stepper.sample()
        row, n = columns.action[t], self._stepper.action_spec.n or 0
        one_hot = n > 0 and row.ndim > 1 and row.shape[-1] == n
        columns.action[t] = np.arange(n) == action[:, None] if one_hot else action.reshape(row.shape)
        for key, rows in columns.others.items():
            rows[t] = self._stepper.uniform_log_prob if key == "action_log_prob" else 0
        return action, NO_VERSION

    def finish(self, columns: Columns, first: int) -> None:
        """See Asking."""


class ByCalling:
    """Any function of a TensorDict; whatever it writes is stored, as it wrote it; or ``keys`` of that.

    Each call gets a TensorDict of its own, in which there is an "observation" of its own and nothing else: what the
    policy wrote is of another step, and maybe of another episode.

    Raises:
        TypeError: the policy gives no TensorDict.
        ValueError: it writes no "action".
    """

    def __init__(
        self,
        policy: Policy,
        stepper: Steps,
        batched: bool,
        device: torch.device,
        version: Callable[[], int],
        gate: Gate,
        keys: Collection[str] | None = None,
    ) -> None:
        self._device = device
        observation = torch.from_numpy(stepper.observation)
        self._observation = observation if batched else observation[0]
        self._input = TensorDict(
            {"observation": self._observation}, self._observation.shape[:1] if batched else (), device=device
        )
        with without_trace(policy, device), _explaining(policy):
            output = gate(lambda: policy(self._input.clone()))()
        self.outputs, read = _outputs(output, keys)

        def act(observation: TensorDict, columns: Columns, t: int) -> int:
            output = policy(observation)
            for key, rows in columns.others.items():
                rows[t] = read(output.get(key))
            columns.action[t] = read(output.get("action"))
            return version()

        self._act = gate(act)

    def begin(self, steps: int) -> None:
        """See Asking."""

    def act(self, columns: Columns, t: int) -> tuple[Array, int]:
        """See Asking."""
        # Its own: it may keep some (a stack of frames, say), and the environment writes into this memory again.
        self._input.set("observation", self._observation.to(self._device, copy=True))
        version = self._act(self._input.clone(recurse=False), columns, t)
        return columns.action[t], version

    def finish(self, columns: Columns, first: int) -> None:
        """See Asking."""


class InParts:
    """A ``SampledPolicy``: its random numbers before the batch, its log-probabilities after it.

    Raises:
        ValueError: a part has not the shape that it ought to have.
    """

    def __init__(
        self, policy: SampledPolicy, stepper: Steps, batched: bool, device: torch.device, version: Callable[[], int]
    ) -> None:
        self._policy, self._device = policy, device
        self._observation = torch.from_numpy(stepper.observation)  # with a leading dimension in any case
        self._stays = device == self._observation.device
        # A model that is synchronised is gated where it is called, which its parts go around. Whether a scheme carries
        # this one does not matter: unlike any function, a network does not wait for another thread.
        with without_trace(policy, device), wsync.gate():
            parameters = policy.distribution_parameters(self._observation.clone().to(device))
            action = policy.choose(parameters, None)
            chosen = {"action": action, "action_log_prob": policy.log_prob(parameters, action)}
        self._like = parameters
        read = torch.Tensor.numpy if _is_plain(action) else to_numpy

        def act(
            observation: torch.Tensor, noise: torch.Tensor | None, parameters: torch.Tensor, columns: Columns, t: int
        ) -> int:
            parameters.copy_(policy.distribution_parameters(observation))
            columns.action[t] = read(policy.choose(parameters, noise))
            return version()

        self._act = wsync.gated(act)
        outputs = {key: torch.from_numpy(to_numpy(value)) for key, value in chosen.items()}
        self.outputs = outputs if batched else {key: value[0] for key, value in outputs.items()}

    def begin(self, steps: int) -> None:
        """See Asking."""
        like = self._like
        noise = [None] * steps if greedy() else self._noise(steps).unbind()
        self._parameters = like.new_empty((steps, *like.shape))
        self._rows = zip(noise, self._parameters.unbind(), strict=True)

    def _noise(self, steps: int) -> torch.Tensor:
        noise, leading = self._policy.noise(self._like, steps), (steps, *self._like.shape[:-1])
        if noise.shape[: len(leading)] != leading:
            kind, told = type(self._policy).__name__, list(noise.shape)
            raise ValueError(f"{kind}.noise(parameters, {steps}) has shape {told}: it begins with {list(leading)}")
        return noise

    def act(self, columns: Columns, t: int) -> tuple[Array, int]:
        """See Asking."""
        observation = self._observation if self._stays else self._observation.to(self._device)
        version = self._act(observation, *next(self._rows), columns, t)
        return columns.action[t], version

    def finish(self, columns: Columns, first: int) -> None:
        """See Asking."""
        actions = torch.from_numpy(columns.action[first:]).to(self._device)
        columns.others["action_log_prob"][first:] = to_numpy(self._policy.log_prob(self._parameters, actions))


@contextmanager
def _explaining(policy: Policy) -> Iterator[None]:
    """Add to what a module over tensors says of the TensorDict that it was given."""
    try:
        yield
    except Exception as error:
        if isinstance(policy, nn.Module) and not isinstance(policy, TensorDictModuleBase):
            kind = type(policy).__name__
            error.add_note(
                f'a policy is called with a TensorDict: TensorDictModule({kind}(…), ["observation"], ["action"])'
            )
        raise


def _outputs(output: TensorDictBase, keys: Collection[str] | None) -> tuple[Mapping[str, torch.Tensor], Read]:
    """What is stored of what a policy has written, and how it is read."""
    if not isinstance(output, TensorDictBase | Mapping):
        raise TypeError(f"the policy gave a {type(output).__name__}, not the TensorDict that it has written into")
    outputs: dict[str, torch.Tensor] = {
        key: value
        for key, value in output.items()
        if isinstance(value, torch.Tensor) and key not in ("observation", "policy_version")
        if keys is None or key in keys
    }
    if "action" not in outputs:
        raise ValueError(f'the policy wrote {sorted(outputs)}, and no "action" among them')
    read = torch.Tensor.numpy if all(_is_plain(value) for value in outputs.values()) else to_numpy
    return {key: torch.from_numpy(to_numpy(value)) for key, value in outputs.items()}, read


def _is_plain(value: torch.Tensor) -> bool:
    """Whether ``numpy()`` gives it: half the time of the general way."""
    return value.is_cpu and value.dtype is not torch.bfloat16
