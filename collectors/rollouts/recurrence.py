"""The state of a recurrent policy: handed from step to step, and zero at the start of an episode."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDictBase

from collectors.environments.specs import to_numpy
from collectors.environments.stepper import Stepper
from collectors.rollouts.columns import Columns, Key

IS_INIT = "is_init"
"""Whether the policy's state starts anew at a frame: at the first one of an episode, at every frame with a random
action, and at the first one after these. bool ``[*B, 1]``, an input of a recurrent policy."""


class RecurrentState:
    """What a policy writes under ``("next", key)`` is its input ``key`` in the next step.

    At the start of an episode the input is zero, and "is_init" is true. Inputs and outputs are stored with the batch.
    A policy that reads "is_init" and writes no such key has no state: then only "is_init" is given and stored.

    Args:
        output: the output of the policy's first call, which has no state as its input.
        stepper: the environments.
        batched: whether the environment has a batch dimension.
    """

    def __init__(self, output: TensorDictBase | Mapping, stepper: Stepper, batched: bool) -> None:
        self._stepper, self._batched = stepper, batched
        self._state = {key: torch.zeros_like(value) for key, value in states_of(output).items()}
        self._is_fresh = True

    def start_anew(self) -> None:
        """Have the next step start from zero, wherever its episode is. Called after frames with random actions."""
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
        """Keep the state that the policy wrote, a copy, and write it to row ``t``. Called after each step."""
        written = states_of(output)
        for key in self._state:
            value = written[key]
            self._state[key] = value.clone()
            columns.others["next", key][t] = to_numpy(value)


def reads_is_init(policy: object) -> bool:
    """Whether `policy` is a module that has "is_init" among its ``in_keys``."""
    return IS_INIT in getattr(policy, "in_keys", ())


def states_of(output: TensorDictBase | Mapping) -> dict[str, torch.Tensor]:
    """Return the tensors under "next" in a policy's output; none if it is not recurrent."""
    step = output.get("next", None)
    if not isinstance(step, TensorDictBase | Mapping):
        return {}
    return {str(key): value for key, value in step.items() if isinstance(value, torch.Tensor)}
