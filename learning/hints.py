"""Hints at settings that are possible, but seldom meant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from collectors.env_config import EnvConfig
from collectors.environments.vector import with_version
from learning.config_errors import CONF
from learning.encoders import MLP


def hints(env: EnvConfig, learner: Any, replaced: str | None = None) -> Iterator[str]:
    """Yield the hints for a run, a line each.

    Args:
        env: the environment.
        learner: of any class.
        replaced: the option of ``env`` that was chosen, if ``env.id`` names another environment; None otherwise.
    """
    if replaced is not None and env.make is None and (preset := _preset_of(env.id)) not in (None, replaced):
        yield f"env.id={env.id} has the settings of env={replaced}; env={preset} has settings for it"
    scale = getattr(learner, "reward_scale", 1.0)
    if env.rewards != "raw" and scale != 1:
        yield (
            f"env.rewards={env.rewards} makes rewards of the order of one, and algorithm.reward_scale={scale:g} scales "
            "them again: say algorithm.reward_scale=1"
        )
    pixels = max((one.pixels for one in learner.policy.modules() if isinstance(one, MLP)), default=0)
    if pixels:
        yield f"the policy takes images as a vector of {pixels:,} numbers: policy=cnn has convolutions for them"


def _preset_of(env_id: str) -> str | None:
    """Return the first option of ``env`` with the id `env_id`."""
    line = re.compile(rf"^ *id: (\w+:)?{re.escape(with_version(env_id.rpartition(':')[2]))}$", re.MULTILINE)
    for path in sorted((CONF / "env").rglob("*.yaml")):
        if line.search(path.read_text(encoding="utf-8")):
            return str(path.relative_to(CONF / "env").with_suffix(""))
    return None
