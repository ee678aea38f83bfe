"""Checks of the arguments of collectors and of their updates."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

import wsync
from collectors.factories import EnvMaker, check_maker, independent
from collectors.rollouts.wrapping import UnusablePolicy
from collectors.staleness import check_count


def check_frames(frames_per_batch: Any, total_frames: Any) -> None:
    """Check the numbers of frames.

    Raises:
        TypeError: one is not a whole number.
        ValueError: one is out of range.
    """
    check_count("frames_per_batch", frames_per_batch, least=1)
    if total_frames != -1:
        check_count("total_frames", total_frames, least=1, otherwise=", or -1 for no end")


def check_limits(init_random_frames: Any, max_frames_per_traj: Any, threads: Any = 1) -> None:
    """Check numbers that are used in the workers, so that a wrong one is an error before they start.

    Raises:
        TypeError: one is not a whole number.
        ValueError: one is out of range.
    """
    check_count("init_random_frames", init_random_frames)
    check_count("threads", threads, least=1)
    if max_frames_per_traj is not None:
        check_count("max_frames_per_traj", max_frames_per_traj, least=1, otherwise=", or None for no limit")


def check_schemes(schemes: Any) -> None:
    """Check ``weight_sync_schemes``.

    Raises:
        TypeError: not ``{model_id: scheme}``.
        ValueError: one scheme is for two models.
        RuntimeError: a scheme is initialised already, which a collector does itself.
    """
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
    """Check that the workers of a collector, which call no ``pull``, would ever get an update.

    Raises:
        ValueError: a scheme has ``initiator="receiver"`` and no ``max_staleness``.
    """
    for model_id, scheme in schemes.items():
        if scheme.initiator == "receiver" and scheme.max_staleness is None:
            raise ValueError(
                f"the scheme for '{model_id}' has initiator='receiver', and a collector's workers do not call pull(): "
                "give the scheme max_staleness=, or leave initiator out"
            )


def check_policy(policy: Any) -> None:
    """Check that ``policy`` can be called with one argument, a TensorDict or (a module) a tensor.

    Raises:
        UnusablePolicy: it cannot; a ``TypeError``.
    """
    if policy is None:
        return
    if not callable(policy):
        raise UnusablePolicy(f"a policy is a module, or a function of a TensorDict, not a {type(policy).__name__}")
    try:
        signature = inspect.signature(policy.forward if isinstance(policy, nn.Module) else policy)
    except (TypeError, ValueError):  # it has none that Python can read
        return
    try:
        signature.bind(None)
    except TypeError as error:
        kind = type(policy).__name__
        raise UnusablePolicy(
            f"{kind}{signature} cannot be called with one argument, the observation ({error}): wrap it so that it "
            f'reads "observation" and writes "action", as TensorDictModule({kind}(…), ["observation"], ["action"]) does'
        ) from error


def has_weights(policy: Any) -> bool:
    """Whether a policy is a module with parameters or buffers; ``TensorDictModule(function, …)`` has none."""
    return isinstance(policy, nn.Module) and next(chain(policy.parameters(), policy.buffers()), None) is not None


def env_makers(create_env_fn: Any) -> list[EnvMaker]:
    """Return the environment functions, one per worker.

    Raises:
        TypeError: neither a function nor a list of functions (or environments).
        ValueError: there is none.
    """
    if callable(create_env_fn):
        return [create_env_fn]
    if not isinstance(create_env_fn, Iterable | None):
        what = type(create_env_fn).__name__
        raise TypeError(f"create_env_fn is a function that makes an environment, or a list of them, not a {what}")
    makers: list[EnvMaker] = list(create_env_fn or ())
    if not makers:
        raise ValueError("no environment: create_env_fn is a list of functions, one for each worker")
    for maker in makers:
        check_maker(maker)
    return independent(makers)


def policy_factory_of_each(policy_factory: Any, workers: int) -> list[Callable[[], Any] | None]:
    """Return the policy factory of each worker; one factory is for all.

    Raises:
        TypeError: one is not a function.
        ValueError: a list has another length.
    """
    several = isinstance(policy_factory, Sequence)
    factories: list[Any] = list(policy_factory) if isinstance(policy_factory, Sequence) else [policy_factory] * workers
    if len(factories) != workers:
        raise ValueError(f"policy_factory has {len(factories)} functions, and there are {workers} worker(s)")
    for factory in factories:
        if not callable(factory) and (several or factory is not None):
            raise TypeError(f"policy_factory is a function that makes a policy, or a list of them, not {factory!r}")
    return factories


def device_of_each(device: Any, workers: int) -> list[str | None]:
    """Return the device of each worker; one device is for all.

    Raises:
        TypeError: neither a device nor a list.
        ValueError: a list has another length.
    """
    if device is None or isinstance(device, str | torch.device):
        return [None if device is None else str(device)] * workers
    if not isinstance(device, Sequence):
        raise TypeError(f"device is one device ('cpu', 'cuda:0'), or a list of one for each worker, not {device!r}")
    if len(device) != workers:
        raise ValueError(f"{len(device)} devices for {workers} workers")
    return [str(one) for one in device]


def check_weights_dict(weights_dict: Any) -> None:
    """Check that ``weights_dict`` is ``{model_id: weights}``.

    Raises:
        TypeError: it is something else.
        ValueError: it is empty.
    """
    if not isinstance(weights_dict, Mapping) or isinstance(weights_dict, TensorDictBase):
        raise TypeError(f"weights_dict is {{model_id: weights}}, not a {type(weights_dict).__name__}")
    if not weights_dict:
        raise ValueError("weights_dict is empty")


def addressed_workers(updates: Collection[Any], worker_ids: Any, workers: int) -> Any:
    """Return the ``worker_ids`` of updates that belong together: by default those that ``{worker: weights}`` names.

    None for all workers, however they were named: the schemes keep such an update for workers that are restarted.

    Raises:
        ValueError: they are not for the same workers.
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
