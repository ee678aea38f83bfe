"""The range of each number among a training run's settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from collectors.errors import ConfigError

Limit = tuple[str, Callable[[float], bool]]
"""A range in words, and whether a number is in it; NaN is in none."""

POSITIVE: Limit = ("more than 0", lambda x: x > 0)  # infinite limits are allowed
POSITIVE_FINITE: Limit = ("more than 0, and finite", lambda x: 0 < x < math.inf)
NOT_NEGATIVE: Limit = ("at least 0", lambda x: x >= 0)
NOT_NEGATIVE_FINITE: Limit = ("at least 0, and finite", lambda x: 0 <= x < math.inf)
SHARE: Limit = ("between 0 and 1", lambda x: 0 <= x <= 1)
FINITE: Limit = ("finite", math.isfinite)
NUMBER: Limit = ("a number", lambda x: not math.isnan(x))

LIMITS: dict[str, Limit] = {
    "num_workers": POSITIVE,
    "num_envs": POSITIVE,
    "total_frames": POSITIVE,
    "staleness": NOT_NEGATIVE,
    "seed": ("between 0 and 2^63 − 1", lambda x: 0 <= x < 2**63),  # what torch, numpy and Gymnasium all take
    "timeout": POSITIVE,
    "threads": ("between 1 and 1024", lambda x: 1 <= x <= 1024),  # OpenMP crashes if it cannot start so many
    "checkpoint_every": NOT_NEGATIVE,
    "weight_sync.timeout": POSITIVE,
    "collector.init_random_frames": NOT_NEGATIVE,
    "collector.worker_timeout": POSITIVE_FINITE,
    "collector.max_restarts": NOT_NEGATIVE,
    "collector.restart_window": POSITIVE,
    "collector.run_ahead": NOT_NEGATIVE,
    "collector.max_staleness": NOT_NEGATIVE,
    "collector.timeout": POSITIVE_FINITE,
    "collector.port": ("between 0 and 65535", lambda x: 0 <= x <= 65535),
    "env.solved_at": FINITE,
    "env.max_episode_steps": POSITIVE,
    "policy.hidden": POSITIVE,
    "policy.initial_std": POSITIVE_FINITE,
    "policy.features": POSITIVE,
    "policy.size": POSITIVE,
    "algorithm.gamma": SHARE,
    "algorithm.gae_lambda": SHARE,
    "algorithm.vtrace_lambda": SHARE,
    "algorithm.clip_rho": POSITIVE,
    "algorithm.clip_c": NOT_NEGATIVE,
    "algorithm.reward_scale": POSITIVE_FINITE,
    "algorithm.epochs": POSITIVE,
    "algorithm.epochs_final": POSITIVE,
    "algorithm.minibatch_size": POSITIVE,
    "algorithm.lr": POSITIVE_FINITE,
    "algorithm.lr_end_factor": NOT_NEGATIVE_FINITE,
    "algorithm.clip": POSITIVE_FINITE,
    "algorithm.clip_final": NOT_NEGATIVE_FINITE,
    "algorithm.anneal_frames": POSITIVE,
    "algorithm.value_coef": NOT_NEGATIVE_FINITE,
    "algorithm.value_clip": POSITIVE,
    "algorithm.entropy_coef": FINITE,
    "algorithm.max_grad_norm": POSITIVE,
    "algorithm.target_kl": NOT_NEGATIVE,
    "algorithm.max_weight": POSITIVE,
    "algorithm.adam_eps": POSITIVE_FINITE,
    "logger.start_after": NOT_NEGATIVE,
    "logger.close_within": NOT_NEGATIVE,
    "chaos.rate": POSITIVE_FINITE,
    "chaos.pause": POSITIVE_FINITE,
    "chaos.limit": NOT_NEGATIVE,
}


def check_ranges(config: Any) -> None:
    """Check every number of `config`, a dataclass of numbers, lists and further dataclasses.

    Raises:
        ConfigError: a setting is out of range; names the first.
    """
    for name, value in _numbers("", config):
        words, holds = LIMITS.get(name.partition("[")[0], NUMBER)
        if not holds(value):
            raise ConfigError(f"{name} has to be {words}, not {value}")


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if is_dataclass(value):
        for field in fields(value):
            yield from _numbers(f"{name}.{field.name}".lstrip("."), getattr(value, field.name))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _numbers(f"{name}[{i}]", item)
    elif isinstance(value, int | float):
        yield name, value
