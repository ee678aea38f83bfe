"""How a rollout comes by its actions: at random, by calling a policy, or by asking it for its parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

import wsync
from collectors.columns import Columns
from collectors.probing import without_trace
from collectors.sampled import SampledPolicy, greedy
from collectors.specs import to_numpy
from collectors.stepper import Steps

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
        """Return actions on the current observation, and the version that chose them; write all but it to row ``t``."""
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

    Each call gets a TensorDict of its own, in which there is an "observation" and nothing else: what the policy wrote
    is of another step, and maybe of another episode.

    Raises:
        ValueError: the policy writes no "action".
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
        def act(observation: TensorDict) -> tuple[TensorDictBase, int]:
            return policy(observation), version()

        self._act, self._device = gate(act), device
        observation = torch.from_numpy(stepper.observation)
        self._observation = observation if batched else observation[0]
        self._input = TensorDict(
            {"observation": self._observation}, self._observation.shape[:1] if batched else (), device=device
        )
        self.outputs, self._read = self._probe(policy, keys)

    def _probe(self, policy: Policy, keys: Collection[str] | None) -> tuple[Mapping[str, torch.Tensor], Read]:
        with without_trace(policy, self._device):
            output, _ = self._act(self._input.clone())
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

    def begin(self, steps: int) -> None:
        """See Asking."""

    def act(self, columns: Columns, t: int) -> tuple[Array, int]:
        """See Asking."""
        if self._device.type != "cpu":  # there the environment has written into the policy's input already
            self._input.set("observation", self._observation.to(self._device))
        output, version = self._act(self._input.clone(recurse=False))
        for key, rows in columns.others.items():
            rows[t] = self._read(output.get(key))
        columns.action[t] = action = self._read(output.get("action"))
        return action, version

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
        def choose(observation: torch.Tensor, noise: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, int]:
            parameters = policy.distribution_parameters(observation)
            return parameters, policy.choose(parameters, noise), version()

        self._policy, self._device = policy, device
        # A model that is synchronised is gated where it is called, which its parts go around. Whether a scheme carries
        # this one does not matter: unlike any function, a network does not wait for another thread.
        self._choose = wsync.gated(choose)
        self._observation = torch.from_numpy(stepper.observation)  # with a leading dimension in any case
        with without_trace(policy, device):
            parameters, action, _ = self._choose(self._observation.clone().to(device), None)
            chosen = {"action": action, "action_log_prob": policy.log_prob(parameters, action)}
        self._like = parameters
        self._read = torch.Tensor.numpy if _is_plain(action) else to_numpy
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
        noise, row = next(self._rows)
        parameters, chosen, version = self._choose(self._observation.to(self._device), noise)
        row.copy_(parameters)
        columns.action[t] = action = self._read(chosen)
        return action, version

    def finish(self, columns: Columns, first: int) -> None:
        """See Asking."""
        actions = torch.from_numpy(columns.action[first:]).to(self._device)
        columns.others["action_log_prob"][first:] = to_numpy(self._policy.log_prob(self._parameters, actions))


def _is_plain(value: torch.Tensor) -> bool:
    """Whether ``numpy()`` gives it: half the time of the general way."""
    return value.is_cpu and value.dtype is not torch.bfloat16
