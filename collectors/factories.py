"""What a user gives a collector to make environments and policies with, and how that crosses to a worker."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import cloudpickle
import gymnasium

from collectors.envs import GymEnv

EnvMaker = Callable[[], Any]
PolicyFactory = Callable[[], Any]
_GYMNASIUM = gymnasium.Env | gymnasium.vector.VectorEnv
_ENVIRONMENTS = GymEnv | _GYMNASIUM


def check_maker(create_env_fn: Any) -> None:
    """Check what is to make one environment.

    Raises:
        TypeError: the argument is neither an environment nor a function.
    """
    if not isinstance(create_env_fn, _ENVIRONMENTS) and not callable(create_env_fn):
        what = f"{type(create_env_fn).__name__} ({create_env_fn!r})"
        raise TypeError(f"create_env_fn is an environment, or a function that makes one, not a {what}")


def make_env(create_env_fn: EnvMaker | GymEnv | gymnasium.Env | gymnasium.vector.VectorEnv) -> GymEnv:
    """Return the environment that is given, or that ``create_env_fn`` makes; a Gymnasium environment is wrapped.

    Raises:
        TypeError: the argument is neither an environment nor a function that makes one.
    """
    check_maker(create_env_fn)
    env = create_env_fn if isinstance(create_env_fn, _ENVIRONMENTS) else create_env_fn()
    if isinstance(env, _GYMNASIUM):
        return GymEnv(env)
    if not isinstance(env, GymEnv):
        raise TypeError(f"create_env_fn made a {type(env).__name__}, not a GymEnv or a Gymnasium environment")
    return env


def independent(makers: Sequence[Any]) -> list[Any]:
    """Return ``makers``; of an environment that occurs several times, each but the first is a copy with a new seed.

    The copies that workers get would continue the same streams of random numbers.
    """
    return [
        partial(_seeded_anew, maker)
        if isinstance(maker, _ENVIRONMENTS) and any(maker is earlier for earlier in makers[:index])
        else maker
        for index, maker in enumerate(makers)
    ]


def _seeded_anew(given: Any) -> GymEnv:
    env = make_env(given)
    env.set_seed(secrets.randbits(31))  # also forces a reset before the next step
    return env


REMEDY_FACTORY = "give a factory (create_env_fn, policy_factory) that makes it there"
REMEDY_GETSTATE = "leave what only the trainer needs out of the scheme's __getstate__, e.g. sockets and queues"


def pickled(value: Any, name: str, remedy: str = REMEDY_FACTORY) -> bytes:
    """Pickle ``value`` with cloudpickle, which takes lambdas and local functions; ``name``, ``remedy``: for the error.

    Raises:
        TypeError: ``value`` cannot be pickled.
    """
    try:
        return cloudpickle.dumps(value)
    except Exception as error:  # __reduce__ of any object may raise anything
        raise TypeError(
            f"the {name} cannot be sent to a worker, because it cannot be pickled ({error}); {remedy}"
        ) from error


def check_picklable(**arguments: Any) -> None:
    """Check each argument alone, before workers are started: the error names it.

    Raises:
        TypeError: one cannot be pickled.
    """
    for name, value in arguments.items():
        pickled(value, name)


def copy_of(policy: Any) -> Any:
    """Return a copy of ``policy`` that shares no memory with it.

    Raises:
        TypeError: ``policy`` cannot be pickled.
    """
    return None if policy is None else cloudpickle.loads(pickled(policy, "policy"))
