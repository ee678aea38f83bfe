"""Gymnasium's native vector CartPole, so that rows are reset by whoever steps it."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

Array = np.ndarray
_ENTRY_POINT = "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"
_NOBODY = np.empty(0, dtype=np.intp)  # rows, by index: in five places a third of the time of a mask


class Choices(spaces.MultiDiscrete):
    """One choice among n, counted from 0, per environment; which ones are not looked at: a stepper's codec has done so.

    Gymnasium's own check takes a fifth of a CartPole step.
    """

    def __init__(self, n: int, num_envs: int) -> None:
        """Among ``n``, each."""
        super().__init__(np.full(num_envs, n, dtype=np.int64))

    def contains(self, x: Any) -> bool:
        """Whether ``x`` is an int64 array of such choices, whichever they are."""
        return isinstance(x, np.ndarray) and x.dtype == np.int64 and x.shape == self.shape


class MaskResetCartPole(CartPoleVectorEnv):
    """Gymnasium's native vector CartPole, with the reset of ended rows in the caller's hands and no reset steps."""

    metadata = CartPoleVectorEnv.metadata | {"autoreset_mode": AutoresetMode.DISABLED}

    def __init__(self, num_envs: int, **settings: Any) -> None:
        """See ``CartPoleVectorEnv``."""
        super().__init__(num_envs, **settings)
        self.action_space = Choices(2, num_envs)

    def step(self, action: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Step all rows; see ``VectorEnv.step``."""
        result = super().step(action)
        self.prev_done = _NOBODY  # whom the base class would reset on top of their next step
        return result

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Reset all rows, or those of ``options["reset_mask"]``, bool ``[num_envs]``."""
        mask = None if options is None else options.get("reset_mask")
        if mask is None or self.state is None:
            return super().reset(seed=seed, options=options)
        (rows,) = mask.nonzero()
        self.state[:, rows] = self.np_random.uniform(low=self.low, high=self.high, size=(4, rows.size))
        self.steps[rows] = 0
        return self.state.T.astype(np.float32), {}


def is_native(spec: EnvSpec) -> bool:
    """Whether environments of ``spec`` are this one."""
    return spec.vector_entry_point == _ENTRY_POINT and not spec.additional_wrappers


def native_settings(spec: EnvSpec, make_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``MaskResetCartPole`` for what ``gymnasium.make(spec, **make_kwargs)`` makes; and unknown others."""
    settings = spec.kwargs | make_kwargs
    settings.pop("disable_env_checker", None)  # there is none
    limit = settings.pop("max_episode_steps", None)
    limit = spec.max_episode_steps if limit is None else limit
    return settings | {"max_episode_steps": sys.maxsize if limit in (None, -1) else limit}  # it would be 500 by default


def takes(settings: dict[str, Any]) -> bool:
    """Whether ``MaskResetCartPole`` knows all of them."""
    return settings.keys() <= inspect.signature(CartPoleVectorEnv).parameters.keys()
