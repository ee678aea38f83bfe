"""The policy of a run: made from its settings, loaded from its folder, and evaluated."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tensordict.nn import InteractionType
from torch import nn

from collectors import Collector, GymEnv
from collectors.config import EnvConfig, env_factory, instantiate_setting, sample
from collectors.environments.transforms import without_side_effects
from collectors.errors import ConfigError
from learning import checkpoint
from learning.making import make_actor_critic
from learning.normalization import ObservationNormalizer
from learning.options import PolicyConfig
from learning.progress import Row
from learning.reporting import Reporter
from learning.reporting.files import FolderError, file_errors, replace_file
from learning.resuming import SETTINGS, read_yaml


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
    config = read_yaml(path := folder / "config.yaml")
    try:
        env, policy_config = EnvConfig(**config["env"]), config["policy"]
    except (KeyError, TypeError) as error:
        raise FolderError(f"{path} is damaged: its settings of env or policy are incomplete") from error
    policy, _, _ = actor_critic(policy_config, env)
    state = checkpoint.load(folder)
    try:
        policy.load_state_dict(state["learner"]["policy"])
    except (KeyError, RuntimeError) as error:
        raise checkpoint.does_not_fit(folder, "config.yaml", error) from error
    return policy.eval(), env_factory(env, None)


def actor_critic(config: Any, env: EnvConfig) -> tuple[nn.Module, nn.Module, ObservationNormalizer | None]:
    """Make the policy, the critic and their normaliser, if any, for an environment; makes one for its specs.

    `config` is a ``PolicyConfig``, or a mapping with a ``_target_`` of the user's own. Raises ConfigError if there is
    no such environment, or the network does not suit it.
    """
    given = dict(config) if isinstance(config, Mapping) else dict(vars(config))
    if "_target_" not in given:
        raise ConfigError("policy has no _target_: name a class or function that makes a network for observations")
    common = {field.name for field in fields(PolicyConfig)} - {"_target_"}
    settings = {name: given.pop(name) for name in common & given.keys()}
    make_network = instantiate_setting("policy", given, _partial_=True)
    with closing(sample(env)) as one:
        observation, action = one.observation_spec["observation"], one.action_spec
    normalizer = ObservationNormalizer(observation) if env.normalize_observations else None
    try:
        return *make_actor_critic(make_network, observation, action, normalizer=normalizer, **settings), normalizer
    except (RuntimeError, TypeError, ValueError) as error:
        message = f"policy={given['_target_']} for env.id={env.id}: {' '.join(str(error).split())}"
        raise ConfigError(message, error) from error


def play(make_env: Any, policy: nn.Module, episodes: int, *, sample: bool, seed: int, max_frames: int) -> list[float]:
    """Return the returns of `episodes`, or of those that end within `max_frames`; the process's generators are seeded.

    `make_env` makes an environment, or is one. Actions are sampled, or the most likely ones.
    """
    returns: list[float] = []
    options: dict[str, Any] = {"frames_per_batch": min(200, max_frames), "total_frames": max_frames}
    how = InteractionType.RANDOM if sample else InteractionType.DETERMINISTIC
    with Collector(make_env, policy, exploration_type=how, **options) as collector:
        collector.set_seed(seed)
        for step in (batch["next"] for batch in collector):
            returns += step["episode_return"][step["done"]].tolist()
            if len(returns) >= episodes:
                break
    return returns[:episodes]


@dataclass(eq=False)
class Evaluation(Reporter):
    """Plays the same `episodes` after every `every` frames, with the most likely actions, while the run waits.

    ``evaluation.csv`` has their mean returns, and the folder ``best`` the policy with the greatest, for `load_policy`.
    """

    every: int
    episodes: int = 10
    say: Callable[[str], object] = print  # told of each evaluation, in a line

    def begin(self, folder: Path, config: dict[str, Any]) -> None:
        self._folder, self._next, self._best = folder, self.every, -math.inf
        self._lines = ["frames,version,return"]

    def update(self, row: Row) -> None:
        if row.frames < self._next:
            return
        self._next, policy = row.frames - row.frames % self.every + self.every, self.policy()
        with without_side_effects(policy):
            returns = play(self.make_env, policy, self.episodes, sample=False, seed=0, max_frames=100_000)
        mean = sum(returns) / len(returns) if returns else math.nan
        self._lines.append(f"{row.frames},{row.version},{mean}")
        replace_file(self._folder / "evaluation.csv", "\n".join([*self._lines, ""]).encode())
        best = ", the best so far" if mean > self._best else ""
        self.say(f"evaluated after {row.frames:,} frames: return {mean:.1f} over {len(returns)} episodes{best}")
        if mean > self._best:
            self._best, best = mean, self._folder / "best"
            with file_errors(best):
                shutil.copytree(self._folder / SETTINGS.parent, best / SETTINGS.parent, dirs_exist_ok=True)
                shutil.copy(self._folder / "config.yaml", best)
            checkpoint.save(best, {"learner": {"policy": policy.state_dict()}})
