"""The policy of a run: made from its settings, and loaded from its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from collectors import GymEnv
from collectors.env_config import EnvConfig, env_factory, sample
from collectors.environments.specs import SpecTree
from collectors.errors import ConfigError, lines_of_user
from collectors.targets import instantiate_setting
from learning import checkpoint
from learning.encoders import leaves
from learning.making import make_actor_critic
from learning.normalization import ObservationNormalizer
from learning.options import PolicyConfig
from learning.reporting.files import FolderError
from learning.resuming import read_yaml


def load_policy(folder: str | Path) -> tuple[nn.Module, Callable[[], GymEnv]]:
    """Return the policy of a run's checkpoint, on the CPU, and a function that makes one environment of the run.

    The policy is in evaluation mode. It reads "observation" from a TensorDict and writes "action". It samples; inside
    ``tensordict.nn.set_interaction_type(InteractionType.DETERMINISTIC)`` it takes the most likely action.

    Args:
        folder: the run's folder. Modules of the user's that the run's settings name have to be on ``sys.path``; that
            folder was the run's ``--config-dir``.

    Raises:
        FolderError: ``config.yaml`` is missing or damaged.
        ConfigError: the environment or the network cannot be made, or its module is not on ``sys.path``.
        CheckpointError: there is no checkpoint, it is damaged, or it is of another network than ``config.yaml`` says.
    """
    folder = Path(folder)
    path = folder / "config.yaml"
    config = read_yaml(path)
    try:
        env, policy_config = EnvConfig(**config["env"]), config["policy"]
    except (KeyError, TypeError) as error:
        raise FolderError(f"{path} is damaged: its settings of env or policy are incomplete") from error
    policy, _, _ = actor_critic(policy_config, env, f"the policy of {folder}")
    state = checkpoint.load(folder)
    try:
        policy.load_state_dict(state["learner"]["policy"])
    except (KeyError, RuntimeError) as error:
        raise checkpoint.does_not_fit(folder, "config.yaml", error) from error
    return policy.eval(), env_factory(env, None)


def actor_critic(
    policy_config: Any, env: EnvConfig, typed: str = "policy", env_option: str | None = None
) -> tuple[nn.Module, nn.Module, ObservationNormalizer | None]:
    """Make the policy, the critic and their normaliser, if any, for an environment; makes one for its specs.

    Args:
        policy_config: a ``PolicyConfig``, or a mapping with a ``_target_`` of the user's own.
        env: the environment.
        typed: what the user has chosen, for errors: "policy=lstm with env=cartpole".
        env_option: see ``collectors.env_config.sample``.

    Raises:
        ConfigError: there is no such environment, or the network does not suit it, or there is no ``_target_``.
    """
    given = dict(policy_config) if isinstance(policy_config, Mapping) else dict(vars(policy_config))
    if "_target_" not in given:
        raise ConfigError("policy has no _target_: name a class or function that makes a network for observations")
    common = {field.name for field in fields(PolicyConfig)} - {"_target_"}
    settings = {name: given.pop(name) for name in common & given.keys()}
    make_network = instantiate_setting("policy", given, _partial_=True)
    with closing(sample(env, env_option)) as one:
        observation, action = one.observation_spec["observation"], one.action_spec
    normalizer = ObservationNormalizer(observation) if env.normalize_observations else None
    try:
        return *make_actor_critic(make_network, observation, action, normalizer=normalizer, **settings), normalizer
    except Exception as error:  # of any class, if the network is the user's own
        raise network_error(error, typed, make_network, observation) from error


def network_error(error: Exception, typed: str, make_network: partial[nn.Module], spec: SpecTree) -> Exception:
    """Return the ConfigError for a network that could not be made or called; `error` if it is a mistake of ours.

    Its notes are the lines of the user's modules that were being executed, the innermost last, and the observation.

    Args:
        error: what was raised; of any class, if in a module of the user's.
        typed: see `actor_critic`.
        make_network: makes the network.
        spec: the spec of an observation.
    """
    called = lines_of_user(error)
    if not (called or isinstance(error, RuntimeError | TypeError | ValueError)):
        return error
    made, text = make_network.func, " ".join(str(error).split())
    if not isinstance(error, RuntimeError | TypeError | ValueError) or not text:  # the text of a KeyError is a key
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    arguments = ", ".join(f"{name}={value!r}" for name, value in make_network.keywords.items())
    name = f"{made.__module__}.{getattr(made, '__qualname__', type(made).__qualname__)}"
    described = ConfigError(f"{typed}: {name}({arguments}): {text}")
    if called:
        shapes = (f"{'.'.join(path)} {list(one.shape)}".lstrip() for path, one in leaves(spec))
        for line in (*called, f"  observation: {', '.join(shapes)}"):
            described.add_note(line)
    return described
