"""Hints at settings that are possible, but seldom meant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from collectors.environments.vector import with_version
from learning.actor_critic import ActorCritic
from learning.config_errors import CONF
from learning.encoders import MLP
from learning.normalization import ObservationNormalizer
from learning.options import TrainConfig
from learning.recurrent import RecurrentPolicy
from learning.validation import environments_of_batch, is_asynchronous


def hints(cfg: TrainConfig, learner: Any, replaced: str | None = None) -> Iterator[str]:
    """Yield the hints for a run, a line each.

    Args:
        cfg: its settings; ``cfg.env`` is an ``EnvConfig``.
        learner: of any class.
        replaced: the option of ``env`` that was chosen, if ``env.id`` names another environment; None otherwise.
    """
    env = cfg.env
    if replaced is not None and env.make is None and (preset := _preset_of(env.id)) != replaced:
        if preset is not None:
            yield f"env.id={env.id} has the settings of env={replaced}; env={preset} has settings for it"
        elif replaced != "gym":
            yield f"env.id={env.id} has the settings of env={replaced}: say env=gym env.id={env.id} for usual ones"
    scale = getattr(learner, "reward_scale", 1.0)
    if env.rewards != "raw" and scale != 1:
        yield (
            f"env.rewards={env.rewards} makes rewards of the order of one, and algorithm.reward_scale={scale:g} scales "
            "them again: say algorithm.reward_scale=1"
        )
    yield from _without_effect(cfg, learner)
    pixels = max((one.pixels for one in learner.policy.modules() if isinstance(one, MLP)), default=0)
    if pixels:
        yield f"the policy takes images as a vector of {pixels:,} numbers: policy=cnn has convolutions for them"


def _without_effect(cfg: TrainConfig, learner: Any) -> Iterator[str]:
    """Yield the hints at settings that have no effect, or none for a part of the run."""
    if any(not one.paths for one in learner.policy.modules() if isinstance(one, ObservationNormalizer)):
        yield "env.normalize_observations has no effect: images, one-hot and binary vectors are not normalised"
    if cfg.collector.max_staleness is not None and not is_asynchronous(cfg):
        yield "collector.max_staleness has no effect: workers of this collector wait while the trainer learns and sends"
    if not isinstance(learner, ActorCritic):
        return
    if cfg.sync_each == "epoch" and not is_asynchronous(cfg):
        yield "sync_each=epoch has no effect but more messages: workers of this collector wait while the trainer learns"
    finals = {
        "learning rate": (learner.lr_final, "lr_end_factor"),
        "clip": (getattr(learner, "clip_final", 1), "clip_final"),
    }
    for name, (final, setting) in finals.items():
        if not final and learner.anneal_frames < cfg.total_frames:
            yield (
                f"the {name} is 0 after {learner.anneal_frames:,} of {cfg.total_frames:,} frames: say "
                f"algorithm.anneal_frames={cfg.total_frames}, or another algorithm.{setting}"
            )
    steps = cfg.frames_per_batch // environments_of_batch(cfg)
    if isinstance(learner.policy, RecurrentPolicy) and learner.minibatch_size < steps:
        yield (
            f"algorithm.minibatch_size={learner.minibatch_size} is less than one sequence, the {steps} frames of an "
            "environment in a batch, which is not cut: a smaller frames_per_batch or more environments make it shorter"
        )


def _preset_of(env_id: str) -> str | None:
    """Return the first option of ``env`` with the id `env_id`."""
    line = re.compile(rf"^ *id: (\w+:)?{re.escape(with_version(env_id.rpartition(':')[2]))}$", re.MULTILINE)
    for path in sorted((CONF / "env").rglob("*.yaml")):
        if line.search(path.read_text(encoding="utf-8")):
            return str(path.relative_to(CONF / "env").with_suffix(""))
    return None
