"""In which range each setting of a training run has to be; what lies outside would be learnt with, and be nonsense."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from collectors.config import ConfigError

Limit = tuple[str, Callable[[float], bool]]
"""A range in words, and whether a number is in it. NaN is in none."""

COUNT: Limit = ("more than 0", lambda x: x > 0)  # infinity, too, for what is a limit itself
FACTOR: Limit = ("more than 0, and finite", lambda x: 0 < x < math.inf)
NOT_NEGATIVE: Limit = ("at least 0", lambda x: x >= 0)
SHARE: Limit = ("between 0 and 1", lambda x: 0 <= x <= 1)
FINITE: Limit = ("finite", math.isfinite)
NUMBER: Limit = ("a number", lambda x: not math.isnan(x))

LIMITS: dict[str, Limit] = {
    "num_workers": COUNT,
    "num_envs": COUNT,
    "total_frames": COUNT,
    "seed": ("between 0 and 2^63 − 1", lambda x: 0 <= x < 2**63),  # what torch, numpy and Gymnasium all take
    "timeout": COUNT,
    "threads": ("between 1 and 1024", lambda x: 1 <= x <= 1024),  # OpenMP crashes if it cannot start so many
    "checkpoint_every": NOT_NEGATIVE,
    "weight_sync.timeout": COUNT,
    "collector.init_random_frames": NOT_NEGATIVE,
    "collector.worker_timeout": COUNT,
    "collector.max_restarts": NOT_NEGATIVE,
    "collector.restart_window": COUNT,
    "collector.timeout": COUNT,
    "collector.port": ("between 0 and 65535", lambda x: 0 <= x <= 65535),
    "env.solved_at": FINITE,
    "env.max_episode_steps": COUNT,
    "policy.hidden": COUNT,
    "policy.initial_std": FACTOR,
    "algorithm.gamma": SHARE,
    "algorithm.gae_lambda": SHARE,
    "algorithm.reward_scale": FACTOR,
    "algorithm.epochs": COUNT,
    "algorithm.epochs_final": COUNT,
    "algorithm.minibatch_size": COUNT,
    "algorithm.lr": FACTOR,
    "algorithm.lr_final": ("at least 0, and finite", lambda x: 0 <= x < math.inf),
    "algorithm.clip": COUNT,
    "algorithm.clip_final": NOT_NEGATIVE,
    "algorithm.anneal_frames": COUNT,
    "algorithm.value_coef": ("at least 0, and finite", lambda x: 0 <= x < math.inf),
    "algorithm.value_clip": COUNT,
    "algorithm.entropy_coef": FINITE,
    "algorithm.max_grad_norm": COUNT,
    "algorithm.target_kl": NOT_NEGATIVE,
    "algorithm.adam_eps": FACTOR,
    "logger.start_after": NOT_NEGATIVE,
    "logger.close_within": NOT_NEGATIVE,
    "chaos.rate": FACTOR,
    "chaos.pause": FACTOR,
    "chaos.limit": NOT_NEGATIVE,
}


def refuse_out_of_range(config: Any) -> None:
    """Look at every number of `config`, a dataclass of numbers, lists and further dataclasses.

    Raises:
        ConfigError: names the first setting that is not in its range.
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
