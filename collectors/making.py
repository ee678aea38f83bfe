"""Environments as users give them: made, or to be made, and Gymnasium's or ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium

from collectors.envs import GymEnv

EnvMaker = Callable[[], Any]


def make_env(create_env_fn: EnvMaker | GymEnv) -> Any:
    """The environment that ``create_env_fn`` makes (a Gymnasium one is wrapped).

    Raises:
        TypeError: it is not an environment.
    """
    env = create_env_fn if isinstance(create_env_fn, GymEnv) else create_env_fn()
    if isinstance(env, gymnasium.Env | gymnasium.vector.VectorEnv):
        return GymEnv(env)
    if not isinstance(env, GymEnv):
        raise TypeError(f"create_env_fn made a {type(env).__name__}, not a GymEnv or a Gymnasium environment")
    return env
