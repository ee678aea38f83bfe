"""Checks of a training run's settings and parts: combinations that contradict each other, and parts of the user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch import nn

from collectors.config import MultiAsyncConfig, MultiSyncConfig, RemoteConfig
from collectors.env_config import EnvConfig, sample
from collectors.environments.specs import SpecTree
from collectors.errors import ConfigError
from learning.config_errors import NOT_FOR_WORKERS, Settings, unknown, unknown_parameter
from learning.encoders import ACTIVATIONS
from learning.making import make_actor_critic, network_error
from learning.normalization import ObservationNormalizer
from learning.options import PolicyConfig, TrainConfig
from learning.ranges import check_ranges
from learning.reporting import Reporter
from learning.summary import check_objective

SYNC_EACH = ("update", "epoch")
WANDB_MODES = ("online", "offline", "disabled")


def check(config: TrainConfig, settings: Settings) -> None:
    """Check all settings, before anything is started.

    Raises:
        ConfigError: a setting is not among `settings`, out of range, or contradicts another one; names the first.
    """
    for name in _added(config):  # by an override with a +, which Hydra accepts for any name
        raise ConfigError(unknown(name, settings))
    check_ranges(config)
    check_combinations(config)
    try:
        check_objective(config.objective)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _added(config: Any, prefix: str = "") -> Iterator[str]:
    known = {field.name for field in fields(config)}
    for name, value in vars(config).items():
        if name not in known:
            yield f"{prefix}{name}"
        elif is_dataclass(value):
            yield from _added(value, f"{prefix}{name}.")


def check_combinations(config: TrainConfig) -> None:
    """Check combinations of settings, each of which is valid by itself.

    Raises:
        ConfigError: two settings contradict each other; names the first pair.
    """
    if isinstance(config.collector, MultiSyncConfig | RemoteConfig):
        _check_joining(config.collector.cat_results, batched=config.num_envs > 1)
    for group in ("weight_sync", "collector"):
        if getattr(getattr(config, group), "host", None) == "":
            raise ConfigError(f"{group}.host is empty: name an address of this machine (127.0.0.1: for workers on it)")
    rows = environments_of_batch(config)
    if config.frames_per_batch < rows:
        of = (
            "num_envs"
            if rows == config.num_envs
            else f"num_workers × num_envs = {config.num_workers} × {config.num_envs}"
        )
        raise ConfigError(
            f"frames_per_batch={config.frames_per_batch} is less than one frame for each of {of} = {rows} environments"
        )
    if getattr(config.policy, "activation", "tanh") not in ACTIVATIONS:
        raise ConfigError(f"policy.activation={config.policy.activation}: it is one of {', '.join(ACTIVATIONS)}")
    if config.sync_each not in SYNC_EACH:
        raise ConfigError(f"sync_each={config.sync_each}: it is one of {', '.join(SYNC_EACH)}")
    if config.sync_each == "epoch" and config.staleness:
        raise ConfigError(f"staleness={config.staleness} counts updates: it cannot be combined with sync_each=epoch")
    if getattr(config.logger, "mode", None) not in (None, *WANDB_MODES):
        raise ConfigError(f"logger.mode={config.logger.mode}: it is one of {', '.join(WANDB_MODES)}, or null")


def _check_joining(how: Any, *, batched: bool) -> None:
    """Check ``cat_results``: batches ``[T]`` can be stacked; ``[E, T]`` can also be joined along E."""
    choices = "say stack, or 0" if batched else "say stack"
    if how in ((1, -1) if batched else (0, -1)):
        raise ConfigError(
            f"collector.cat_results={how} joins the workers' batches along time, as if the frames of one followed "
            f"those of another: {choices}"
        )
    if how != "stack" and not (batched and how in (0, -2)):
        raise ConfigError(f"collector.cat_results={how}: a worker's batch has no such dimension: {choices}")


def environments_of_batch(config: TrainConfig) -> int:
    """Return the number of environments in a batch: of all workers, or of one in asynchronous collection."""
    return config.num_envs * (1 if is_asynchronous(config) else config.num_workers)


def is_asynchronous(config: TrainConfig) -> bool:
    """Return whether workers collect while the trainer learns."""
    one = config.collector
    return isinstance(one, MultiAsyncConfig) or (isinstance(one, RemoteConfig) and not one.sync)


_GIVEN = {"policy": 1, "algorithm": 2}
"""Number of leading arguments that ``train.py`` gives: the spec of an observation; the policy and the critic."""


def own_settings(group: str, target: Callable[..., Any]) -> list[str] | None:
    """Return the names that the YAML file of a user's `target` may have in `group`; None if it accepts any.

    Raises:
        TypeError, ValueError: Python does not know the parameters of `target`.
    """
    parameters = [*inspect.signature(target).parameters.values()][_GIVEN.get(group, 0) :]
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    of_all = {"policy": _names(PolicyConfig), "env": _names(EnvConfig) - {"kwargs", "make"}}.get(group, set())
    return [*(one.name for one in parameters), *(of_all - {"_target_"})]


def check_backend(target: Any) -> None:
    """Check, before its own options are, that workers of ``train.py`` can receive weights by a scheme.

    Args:
        target: the ``_target_`` of ``weight_sync``.

    Raises:
        ConfigError: they cannot; says what the scheme is for.
    """
    name = str(target).rpartition(".")[2]
    if name in NOT_FOR_WORKERS:
        instead = "choose weight_sync=shared_mem, for instance"
        raise ConfigError(f"{name} {NOT_FOR_WORKERS[name]}, not to the workers of train.py: {instead}")


def network_settings(policy: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of the network itself, and the others of ``PolicyConfig``.

    Args:
        policy: a ``PolicyConfig``, or a mapping with a ``_target_`` of the user's own.

    Raises:
        ConfigError: there is no ``_target_``.
    """
    network = {**policy} if isinstance(policy, Mapping) else {name: getattr(policy, name) for name in _names(policy)}
    if "_target_" not in network:
        raise ConfigError("policy has no _target_: name a class or function that makes a network for observations")
    return network, {name: network.pop(name) for name in (_names(PolicyConfig) - {"_target_"}) & network.keys()}


def actor_critic(
    make_network: Callable[[SpecTree], nn.Module],
    env: EnvConfig,
    typed: str = "policy",
    env_option: str | None = None,
    **settings: Any,
) -> tuple[nn.Module, nn.Module, ObservationNormalizer | None]:
    """Make the policy, the critic and their normaliser, if any, for an environment; makes one for its specs.

    Args:
        make_network: makes a network for the spec of an observation.
        env: the environment.
        typed: what the user has chosen, for errors: "policy=lstm with env=cartpole".
        env_option: see ``collectors.env_config.sample``.
        **settings: see ``learning.make_actor_critic``.

    Raises:
        ConfigError: there is no such environment, or the network does not suit it or has no parameter of that name.
    """
    made = _described(make_network)
    with closing(sample(env, env_option)) as one:
        observation, action = one.observation_spec["observation"], one.action_spec
    normalizer = ObservationNormalizer(observation) if env.normalize_observations else None
    try:
        return *make_actor_critic(make_network, observation, action, normalizer=normalizer, **settings), normalizer
    except Exception as error:  # of any class, if the network is the user's own
        if (described := network_error(error, f"{typed}: {made}", observation)) is None:
            raise
        raise described from error


def _described(make_network: Callable[..., Any]) -> str:
    """Return a network's class (or function) with its settings, for errors: ``mine.Wide(width=256)``.

    Raises:
        ConfigError: it has no parameter for a setting.
    """
    target = make_network.func if isinstance(make_network, partial) else make_network
    given = make_network.keywords if isinstance(make_network, partial) else {}
    name = f"{target.__module__}.{getattr(target, '__qualname__', type(target).__qualname__)}"
    known = own_settings("policy", target)
    for unknown_one in given.keys() - set(given if known is None else known):
        raise ConfigError(unknown_parameter(f"policy.{unknown_one}", name, known or ()))
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"


def check_parts(learner: Any, logger: Any, callbacks: Sequence[Any], sync_each: str = "update") -> None:
    """Check the learner and the reporters, which may be a user's own.

    Args:
        learner: as made by ``algorithm``.
        logger: as made by ``logger``.
        callbacks: as made by ``callbacks``.
        sync_each: see ``TrainConfig``.

    Raises:
        ConfigError: the learner lacks what the training loop uses, or a reporter is none.
    """
    needed = ["policy", "update", "state_dict", "load_state_dict", *(["after_epoch"] if sync_each == "epoch" else [])]
    if missing := [name for name in needed if not hasattr(learner, name)]:  # a learner is of any class
        raise ConfigError(
            f"algorithm: {type(learner).__name__} has no {', '.join(missing)}: derive it from learning.ActorCritic, "
            "or see what that has"
        )
    for name, one in {"logger": logger, **{f"callbacks[{i}]": one for i, one in enumerate(callbacks)}}.items():
        if not isinstance(one, Reporter):
            raise ConfigError(
                f"{name} gives a {type(one).__name__}: its _target_ has to be derived from learning.reporting.Reporter"
            )


def _names(config: Any) -> set[str]:
    return {field.name for field in fields(config)}
