"""What a user gives a collector: checks of it, and how it crosses to a worker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import cloudpickle
import gymnasium
import torch
from tensordict import TensorDictBase
from torch import nn
from torch.nn.parameter import is_lazy

import wsync
from collectors.batches import check_count
from collectors.envs import GymEnv
from collectors.rollouts.rollout import Rollout

EnvMaker = Callable[[], Any]
PolicyFactory = Callable[[], Any]
_GYMNASIUM = gymnasium.Env | gymnasium.vector.VectorEnv
_ENVIRONMENTS = GymEnv | _GYMNASIUM

# --- environments ---


def make_env(create_env_fn: Any) -> GymEnv:
    """Return the environment that is given, or that ``create_env_fn`` makes; a Gymnasium environment is wrapped."""
    _check_maker(create_env_fn)
    env = create_env_fn if isinstance(create_env_fn, _ENVIRONMENTS) else create_env_fn()
    if isinstance(env, _GYMNASIUM):
        return GymEnv(env)
    if not isinstance(env, GymEnv):
        raise TypeError(f"create_env_fn made a {type(env).__name__}, not a GymEnv or a Gymnasium environment")
    return env


def env_makers(create_env_fn: Any) -> list[EnvMaker]:
    """Return the environment functions, one per worker.

    Raises:
        TypeError: there is another object.
        ValueError: there is none, or an environment twice: its copies would have the same random numbers.
    """
    if callable(create_env_fn):
        return [create_env_fn]
    if not isinstance(create_env_fn, Iterable | None):
        what = type(create_env_fn).__name__
        raise TypeError(f"create_env_fn is a function that makes an environment, or a list of them, not a {what}")
    makers: list[Any] = list(create_env_fn or ())
    if not makers:
        raise ValueError("no environment: create_env_fn is a list of functions, one for each worker")
    for index, maker in enumerate(makers):
        _check_maker(maker)
        if isinstance(maker, _ENVIRONMENTS) and any(maker is earlier for earlier in makers[:index]):
            raise ValueError(f"create_env_fn has {maker} twice: make each worker's environment in a function")
    return makers


def _check_maker(create_env_fn: Any) -> None:
    if not isinstance(create_env_fn, _ENVIRONMENTS) and not callable(create_env_fn):
        what = f"{type(create_env_fn).__name__} ({create_env_fn!r})"
        raise TypeError(f"create_env_fn is an environment, or a function that makes one, not a {what}")


# --- numbers, policies and devices ---


def check_numbers(max_frames_per_traj: Any, **others: Any) -> None:
    """Check numbers that are used in the workers, before these start; raise TypeError or ValueError."""
    if max_frames_per_traj is not None:
        check_count("max_frames_per_traj", max_frames_per_traj, least=1, otherwise=", or None for no limit")
    for name, number in others.items():
        check_count(name, number, least=int(name == "threads"))


def has_weights(policy: Any) -> bool:
    """Whether a policy is a module with parameters or buffers; ``TensorDictModule(function, …)`` has none."""
    return isinstance(policy, nn.Module) and next(chain(policy.parameters(), policy.buffers()), None) is not None


def initialise(policy: Any, create_env_fn: Any) -> None:
    """Initialise the lazy modules of a policy, if there are any, by an observation."""
    tensors = chain(policy.parameters(), policy.buffers()) if isinstance(policy, nn.Module) else ()
    if (lazy := next(filter(is_lazy, tensors), None)) is not None:
        env = make_env(create_env_fn)
        try:
            Rollout(env, policy, device=lazy.device).buffer(1)
        finally:
            if not isinstance(create_env_fn, _ENVIRONMENTS):
                env.close()


def policy_factory_of_each(policy_factory: Any, workers: int) -> list[PolicyFactory | None]:
    """Return the policy factory of each worker; one factory is for all. Raise TypeError or ValueError."""
    several = isinstance(policy_factory, Sequence)
    factories: list[Any] = list(policy_factory) if isinstance(policy_factory, Sequence) else [policy_factory] * workers
    if len(factories) != workers:
        raise ValueError(f"policy_factory has {len(factories)} functions, and there are {workers} worker(s)")
    for factory in factories:
        if not callable(factory) and (several or factory is not None):
            raise TypeError(f"policy_factory is a function that makes a policy, or a list of them, not {factory!r}")
    return factories


def device_of_each(device: Any, workers: int) -> list[str | None]:
    """Return the device of each worker; one device is for all. Raise TypeError or ValueError."""
    if device is None or isinstance(device, str | torch.device):
        return [None if device is None else str(device)] * workers
    if not isinstance(device, Sequence):
        raise TypeError(f"device is one device ('cpu', 'cuda:0'), or a list of one for each worker, not {device!r}")
    if len(device) != workers:
        raise ValueError(f"{len(device)} devices for {workers} workers")
    return [str(one) for one in device]


# --- schemes and weights ---


def check_schemes(schemes: Any) -> None:
    """Check ``weight_sync_schemes``; raise TypeError, ValueError, or (a scheme is initialised already) RuntimeError."""
    if not isinstance(schemes, Mapping | None):
        what = type(schemes).__name__
        raise TypeError(f"weight_sync_schemes is {{model_id: scheme}}, {{'policy': …}} for instance, not a {what}")
    seen: dict[int, str] = {}
    for model_id, scheme in (schemes or {}).items():
        if not isinstance(scheme, wsync.WeightSyncScheme):
            what = scheme if isinstance(scheme, type | str) else type(scheme)
            raise TypeError(f"the scheme for '{model_id}' is a WeightSyncScheme, not {what!r}")
        first = seen.setdefault(id(scheme), model_id)
        if first != model_id:
            raise ValueError(f"'{first}' and '{model_id}' have the same scheme object: a scheme is for one model")
        if scheme.model_id is not None:
            raise RuntimeError(
                f"the scheme for '{model_id}' is initialised already, for '{scheme.model_id}': leave out the line "
                f"scheme.init_on_sender('{scheme.model_id}', …), and connect(); the collector calls both. (If another "
                "collector has initialised it, make a new one for this one.)"
            )


def check_fetching(schemes: Mapping[str, wsync.WeightSyncScheme]) -> None:
    """Check that workers, which call no ``pull``, would ever get an update; raise ValueError if not."""
    for model_id, scheme in schemes.items():
        if scheme.initiator == "receiver" and scheme.max_staleness is None:
            raise ValueError(
                f"the scheme for '{model_id}' has initiator='receiver', and a collector's workers do not call pull(): "
                "give the scheme max_staleness=, or leave initiator out"
            )


def check_weights_dict(weights_dict: Any) -> None:
    """Check that ``weights_dict`` is ``{model_id: weights}``; raise TypeError or ValueError."""
    if not isinstance(weights_dict, Mapping) or isinstance(weights_dict, TensorDictBase):
        raise TypeError(f"weights_dict is {{model_id: weights}}, not a {type(weights_dict).__name__}")
    if not weights_dict:
        raise ValueError("weights_dict is empty")


def addressed_workers(updates: Collection[Any], worker_ids: Any, workers: int) -> Any:
    """Return the ``worker_ids`` of updates that belong together: by default those that ``{worker: weights}`` names.

    None for all workers, however they were named: the schemes keep such an update for workers that are restarted.
    """
    named = [set(own) for weights in updates if (own := wsync.per_worker(weights)) is not None]
    everyone = set(range(workers))
    if worker_ids is not None:
        wanted = set(wsync.worker_list(worker_ids, workers))
    else:
        wanted = named[0] if named and len(named) == len(updates) else everyone
    odd = next((own for own in named if own != wanted), None)
    if odd is not None:
        raise ValueError(f"weights for worker(s) {sorted(odd)} in an update of worker(s) {sorted(wanted)}")
    return None if wanted == everyone else sorted(wanted)


# --- pickles ---

REMEDY_FACTORY = "give a factory (create_env_fn, policy_factory) that makes it there"
REMEDY_GETSTATE = "leave what only the trainer needs out of the scheme's __getstate__, e.g. sockets and queues"


def pickled(value: Any, name: str, remedy: str = REMEDY_FACTORY) -> bytes:
    """Pickle ``value`` with cloudpickle, which takes lambdas and local functions; TypeError names it if that fails."""
    try:
        return cloudpickle.dumps(value)
    except Exception as error:  # __reduce__ of any object may raise anything
        raise TypeError(
            f"the {name} cannot be sent to a worker, because it cannot be pickled ({error}); {remedy}"
        ) from error
