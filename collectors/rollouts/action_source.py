"""Sources of a rollout's actions: random, a policy that is called, or a ``SampledPolicy`` used in parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

import wsync
from collectors.environments.specs import Array, ArrayTree, as_tensors, to_numpy
from collectors.environments.stepper import RESULTS, Stepper
from collectors.environments.transforms import without_side_effects
from collectors.rollouts.sampled import SampledPolicy, as_policy, greedy

Key = str | tuple[str, ...]
Policy = Callable[[TensorDictBase], TensorDictBase]
Gate = Callable[[Callable[..., Any]], Callable[..., Any]]
NO_VERSION = -1
"""``policy_version`` of frames in which no policy acted (random ones)."""

IS_INIT = "is_init"
"""Whether the policy's state starts anew at a frame: at the first one of an episode, at every frame with a random
action, and at the first one after these. bool ``[*B, 1]``, an input of a recurrent policy."""


class Columns:
    """Numpy views ``[T, E, *]`` of the tensors of a batch on the CPU: a step writes one row of each."""

    def __init__(self, batch: TensorDictBase, policy_keys: Iterable[Key], batched: bool) -> None:

        def rows(value: Any) -> Any:
            if isinstance(value, TensorDictBase):
                return ArrayTree({name: rows(part) for name, part in value.items()})
            return value.numpy().swapaxes(0, 1) if batched else value.numpy()[:, None]

        self.steps = batch.batch_size[-1]
        self.observation, self.version = rows(batch.get("observation")), rows(batch.get("policy_version"))
        self.mask = rows(batch.get("mask")) if "mask" in batch.keys() else None  # noqa: SIM118  (it is not a dict)
        self.action = rows(batch.get("action"))
        self.others = {key: rows(batch.get(key)) for key in policy_keys if key != "action"}
        self.successor = rows(batch.get(("next", "observation")))
        self.results = {name: rows(batch.get(("next", name)))[..., 0] for name in RESULTS}

    def write_result(self, t: int, stepper: Stepper) -> None:
        """Write the results of a step into row ``t``."""
        self.successor[t] = stepper.observation
        for name, column in self.results.items():
            column[t] = getattr(stepper, name)
        if self.mask is not None and stepper.reset_step is not None:
            self.mask[t] = ~stepper.reset_step


class ActionSource(ABC):
    """A source of actions. Its methods are called by the acting thread, under ``torch.no_grad()``.

    Attributes:
        outputs: one example of each output that is stored, by key, for the environment's batch size.
    """

    outputs: Mapping[Key, torch.Tensor]

    def begin(self, rows: range, *, after_random: bool) -> None:  # noqa: B027  most sources prepare nothing
        """Prepare ``act`` for ``rows``, the rest of a batch; the frame before may have had a random action."""

    @abstractmethod
    def act(self, columns: Columns, t: int) -> tuple[Array, int]:
        """Write the actions for the current observation, and other outputs, to row ``t``; return actions and version.

        Called once per step. Raises whatever the policy raises. An output may be a view of the weights or of the
        observation: it is copied before the gate is left.
        """

    def finish(self, columns: Columns, first: int) -> None:  # noqa: B027
        """Write what can be computed for the rows from ``first`` on at once. Called after all steps, as ``begin``."""


class RandomActions(ActionSource):
    """Random actions, with their log-probabilities; "is_init" is true, and other outputs of a policy are 0."""

    def __init__(self, stepper: Stepper, batched: bool) -> None:
        self._stepper = stepper
        spec = stepper.action_spec
        size = (stepper.num_envs,) if batched else ()
        self.outputs = {"action": torch.zeros(size if spec.is_discrete else (*size, *spec.shape), dtype=spec.dtype)}

    def act(self, columns: Columns, t: int) -> tuple[Array, int]:
        """Draw actions."""
        action, log_prob = self._stepper.sample()
        row, n = columns.action[t], self._stepper.action_spec.n or 0
        one_hot = n > 0 and row.ndim > 1 and row.shape[-1] == n
        columns.action[t] = np.arange(n) == action[:, None] if one_hot else action.reshape(row.shape)
        for key, rows in columns.others.items():
            one = rows[t]
            one[...] = log_prob.reshape(-1, *(1,) * (one.ndim - 1)) if key == "action_log_prob" else key == IS_INIT
        return action, NO_VERSION


class CalledPolicy(ActionSource):
    """Any function of a TensorDict, or module of a tensor; its outputs are stored as they are.

    Each call gets a new TensorDict: a copy of the current "observation", and the state of a recurrent policy. The first
    call has no state.
    """

    def __init__(
        self,
        policy: Policy,
        stepper: Stepper,
        batched: bool,
        device: torch.device,
        version: Callable[[], int],
        gate: Gate,
    ) -> None:
        self._device = device
        size = (stepper.num_envs,) if batched else ()
        observation = as_tensors(stepper.observation, stepper.num_envs)
        self._observation = observation if batched else observation[0]
        self._input = TensorDict({"observation": self._observation}, size, device=device)
        reads_is_init = IS_INIT in getattr(policy, "in_keys", ())
        example = self._input.clone(recurse=False)
        if reads_is_init:
            example.set(IS_INIT, torch.ones((*size, 1), dtype=torch.bool, device=device))
        policy = as_policy(policy)
        with without_side_effects(policy, device):
            output = gate(policy)(example.clone())
        written, read = _outputs(output)
        carries = bool(_states_of(output)) or reads_is_init
        self._state = state = RecurrentState(output, stepper, batched) if carries else None
        self.outputs = written if state is None else {**written, **state.columns}

        def act(observation: TensorDict, columns: Columns, t: int) -> int:
            output = policy(observation)
            for key in written:
                if key != "action":
                    columns.others[key][t] = read(output.get(key))
            columns.action[t] = read(output.get("action"))
            if state is not None:
                state.take(output, columns, t)
            return version()

        self._act = gate(act)

    def begin(self, rows: range, *, after_random: bool) -> None:
        """Start from a state of zero after random actions."""
        if after_random and self._state is not None:
            self._state.start_anew()

    def act(self, columns: Columns, t: int) -> tuple[Array, int]:
        """Call the policy."""
        # A copy: the policy may keep observations (a stack of frames), and the environment overwrites this memory.
        self._input.set("observation", self._observation.clone().to(self._device))
        inputs = self._input.clone(recurse=False)
        if self._state is not None:
            self._state.give(inputs, columns, t)
        version = self._act(inputs, columns, t)
        return columns.action[t], version


class RecurrentState:
    """What a policy writes under ``("next", key)`` is its input ``key`` in the next step.

    At the start of an episode the input is zero, and "is_init" is true. Inputs and outputs are stored with the batch.
    A policy that reads "is_init" and writes no such key has no state: then only "is_init" is given and stored.
    """

    def __init__(self, output: TensorDictBase | Mapping, stepper: Stepper, batched: bool) -> None:
        self._stepper, self._batched = stepper, batched
        self._state = {key: torch.zeros_like(value) for key, value in _states_of(output).items()}
        self._is_fresh = True

    def start_anew(self) -> None:
        """Have the next step start from zero, wherever its episode is."""
        self._is_fresh = True

    @property
    def columns(self) -> Mapping[Key, torch.Tensor]:
        """One example of each tensor that is stored, by key."""
        state = {key: torch.from_numpy(to_numpy(value)) for key, value in self._state.items()}
        flag = torch.zeros((self._stepper.num_envs, 1) if self._batched else (1,), dtype=torch.bool)
        return {**state, **{("next", key): value for key, value in state.items()}, IS_INIT: flag}

    def give(self, inputs: TensorDictBase, columns: Columns, t: int) -> None:
        """Set the state and "is_init" in `inputs`, and write them to row ``t``. Called before each step."""
        started = torch.from_numpy(self._stepper.is_init) | self._is_fresh
        columns.others[IS_INIT][t] = started.numpy()[:, None]
        started = started if self._batched else started[0]
        inputs.set(IS_INIT, started.unsqueeze(-1).to(inputs.device))
        for key, value in self._state.items():
            rows = started.to(value.device).reshape(*started.shape, *[1] * (value.ndim - started.ndim))
            current = value.masked_fill(rows, 0)
            inputs.set(key, current)
            columns.others[key][t] = to_numpy(current)
        self._is_fresh = False

    def take(self, output: TensorDictBase | Mapping, columns: Columns, t: int) -> None:
        """Keep a copy of the state that the policy wrote, and write it to row ``t``. Called after each step."""
        written = _states_of(output)
        for key in self._state:
            self._state[key] = written[key].clone()
            columns.others["next", key][t] = to_numpy(written[key])


class PolicyInParts(ActionSource):
    """A ``SampledPolicy``: random numbers are drawn before the batch, log-probabilities computed after it."""

    def __init__(
        self, policy: SampledPolicy, stepper: Stepper, batched: bool, device: torch.device, version: Callable[[], int]
    ) -> None:
        self._policy, self._device = policy, device
        self._observation = as_tensors(stepper.observation, stepper.num_envs)  # always with a leading dimension

        # The gate of a synchronised module is in its call, which its parts bypass. It is entered without a scheme, too
        # (unlike that of ``CalledPolicy``): a network waits for no other thread, which might need the gate.
        def example() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            parameters = policy.distribution_parameters(self._observation.clone().to(device))
            action = policy.choose(parameters, None)
            return parameters, action, policy.log_prob(parameters, action)

        with without_side_effects(policy, device):
            parameters, action, log_prob = wsync.gated(example, policy)()
        chosen = {"action": action, "action_log_prob": log_prob}
        self._like = parameters

        def act(columns: Columns, t: int) -> int:
            columns.action[t], self._parameters[t] = self._choose(t - self._first)
            return version()

        self._act = wsync.gated(act, policy)
        outputs: dict[Key, torch.Tensor] = {key: torch.from_numpy(to_numpy(value)) for key, value in chosen.items()}
        self.outputs = outputs if batched else {key: value[0] for key, value in outputs.items()}

    def begin(self, rows: range, *, after_random: bool) -> None:
        """Draw the noise of all steps."""
        like, noise, steps = self._like, None, len(rows)
        if not greedy():
            noise, leading = self._policy.noise(like, steps), (steps, *like.shape[:-1])
            if noise.shape[: len(leading)] != leading:
                said = f"{type(self._policy).__name__}.noise(parameters, {steps}) has shape {list(noise.shape)}"
                raise ValueError(f"{said}: it has to start with {list(leading)}")
        self._first, self._parameters = rows.start, np.empty((rows.stop, *like.shape), to_numpy(like).dtype)
        self._choose = self._policy.prepare(self._observation, noise, self._device)  # a tensor may be a new one

    def act(self, columns: Columns, t: int) -> tuple[Array, int]:
        """Compute parameters, and choose."""
        return columns.action[t], self._act(columns, t)

    def finish(self, columns: Columns, first: int) -> None:
        """Compute the log-probabilities of all steps."""
        actions = torch.from_numpy(columns.action[first:]).to(self._device)
        parameters = torch.from_numpy(self._parameters[first:]).to(self._device, self._like.dtype)
        columns.others["action_log_prob"][first:] = to_numpy(self._policy.log_prob(parameters, actions))


def _states_of(output: TensorDictBase | Mapping) -> dict[str, torch.Tensor]:
    """Return the tensors under "next" in a policy's output; none if it is not recurrent."""
    step = output.get("next", None)
    if not isinstance(step, TensorDictBase | Mapping):
        return {}
    return {str(key): value for key, value in step.items() if isinstance(value, torch.Tensor)}


def _outputs(output: TensorDictBase) -> tuple[dict[Key, torch.Tensor], Callable[[torch.Tensor], Array]]:
    """Return the outputs of a policy that are stored, and the function that reads them."""
    if not isinstance(output, TensorDictBase | Mapping):
        raise TypeError(f"the policy returned a {type(output).__name__}, not the TensorDict that it was given")
    if "mask" in output:
        raise ValueError('the policy wrote "mask", which marks the rows of a batch that are frames: rename it')
    if taken := sorted(_states_of(output).keys() & {"observation", "policy_version", IS_INIT, *RESULTS}):
        raise ValueError(
            f'the policy wrote ("next", "{taken[0]}"), which is the environment\'s or the collector\'s: rename it'
        )
    outputs: dict[Key, torch.Tensor] = {
        key: value
        for key, value in output.items()
        if isinstance(value, torch.Tensor) and key not in ("observation", "policy_version", IS_INIT)
    }
    if "action" not in outputs:
        raise ValueError(f'the policy wrote {sorted(outputs)}, and no "action" among them')
    read = (
        torch.Tensor.numpy
        if all(one.is_cpu and one.dtype is not torch.bfloat16 for one in outputs.values())
        else to_numpy
    )
    return {key: torch.from_numpy(to_numpy(value)) for key, value in outputs.items()}, read
