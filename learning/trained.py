"""The policy that a run of ``train.py`` has trained, and the environment that it was trained in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import nn

from collectors import GymEnv
from collectors.env_config import EnvConfig, env_factory
from collectors.targets import instantiate_setting
from learning import checkpoint
from learning.reporting.files import FolderError
from learning.resuming import read_yaml
from learning.validation import actor_critic, network_settings


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
    config: Any = OmegaConf.to_container(read_yaml(path))
    try:
        env = EnvConfig(**config["env"])
        network, settings = network_settings(config["policy"])
    except (KeyError, TypeError) as error:
        raise FolderError(f"{path} is damaged: its settings of env or policy are incomplete") from error
    make_network = instantiate_setting("policy", network, _partial_=True)
    policy, _, _ = actor_critic(make_network, env, f"the policy of {folder}", **settings)
    state = checkpoint.load(folder)
    try:
        policy.load_state_dict(state["learner"]["policy"])
    except (KeyError, RuntimeError) as error:
        detail = " ".join(str(error).split())
        raise checkpoint.CheckpointError(f"{folder / checkpoint.FILE} does not fit config.yaml: {detail}") from error
    return policy.eval(), env_factory(env, None)
