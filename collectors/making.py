"""Environments as users give them: made, or to be made, and Gymnasium's or ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium

from collectors.envs import GymEnv

EnvMaker = Callable[[], Any]
_GYMNASIUMS = gymnasium.Env | gymnasium.vector.VectorEnv


def make_env(create_env_fn: EnvMaker | GymEnv | gymnasium.Env | gymnasium.vector.VectorEnv) -> GymEnv:
    """The environment that was given, or that ``create_env_fn`` makes (a Gymnasium one is wrapped).

    Raises:
        TypeError: it is not an environment, and makes none.
    """
    if isinstance(create_env_fn, GymEnv | _GYMNASIUMS):
        env = create_env_fn
    elif callable(create_env_fn):
        env = create_env_fn()
    else:
        what = type(create_env_fn).__name__
        raise TypeError(f"create_env_fn is an environment, or a function that makes one, not a {what}")
    if isinstance(env, _GYMNASIUMS):
        return GymEnv(env)
    if not isinstance(env, GymEnv):
        raise TypeError(f"create_env_fn made a {type(env).__name__}, not a GymEnv or a Gymnasium environment")
    return env
