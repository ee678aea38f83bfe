"""Structured configs of a training run and its policy, and checks of them before anything is started.

``learning.config`` makes the configs of classes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from collectors.errors import ConfigError
from learning.summary import objective_of, summary_without_frames

MISSING: Any = "???"  # a value that has to be given, as OmegaConf spells it


@dataclass
class TrainConfig:
    """A training run, composed from ``conf/train.yaml``, which explains the settings; the groups have configs too."""

    num_workers: int = 2
    num_envs: int = 16
    frames_per_batch: int = 1536
    sync_each: str = "update"
    total_frames: int = MISSING
    stop_when_solved: bool = True
    staleness: int = 0
    staleness_spread: int = 0
    staleness_from: str | None = None
    seed: int = 0
    timeout: float | None = 60.0
    device: str = "cpu"
    threads: int = 1
    checkpoint_every: float = 60.0
    evaluate_every: int | None = None
    evaluate_episodes: int = 10
    resume: str | None = None
    objective: str = "episode_return_mean_100"
    weight_sync: Any = MISSING
    collector: Any = MISSING
    env: Any = MISSING
    policy: Any = MISSING
    algorithm: Any = MISSING
    logger: Any = MISSING
    callbacks: list[Any] = field(default_factory=list)


@dataclass
class PolicyConfig:
    """The network of the policy and of the critic, a class or function of the spec of an observation.

    Attributes:
        initial_std: standard deviation of continuous actions at the start, in units of half the action range.
        shared: whether one network serves the policy and the critic; otherwise each has its own.
    """

    _target_: str = MISSING
    initial_std: float = 1.0
    shared: bool = False


def _each(limit: Any, names: str) -> dict[str, TypeAdapter[Any]]:
    return dict.fromkeys(names.split(), TypeAdapter(limit))


LIMITS = {
    **_each(  # infinity is a limit itself
        Annotated[float, Field(gt=0)],
        "num_workers num_envs total_frames evaluate_every evaluate_episodes timeout weight_sync.timeout "
        "env.max_episode_steps policy.hidden policy.features policy.size algorithm.clip_rho algorithm.epochs "
        "algorithm.epochs_final algorithm.minibatch_size algorithm.anneal_frames algorithm.max_grad_norm "
        "algorithm.max_weight",
    ),
    **_each(
        Annotated[float, Field(gt=0, allow_inf_nan=False)],
        "collector.worker_timeout collector.timeout policy.initial_std algorithm.reward_scale algorithm.lr "
        "algorithm.clip algorithm.adam_eps",
    ),
    **_each(
        Annotated[float, Field(ge=0)],
        "staleness staleness_spread checkpoint_every collector.init_random_frames collector.max_restarts "
        "collector.run_ahead collector.max_staleness algorithm.clip_c logger.start_after logger.close_within",
    ),
    **_each(
        Annotated[float, Field(ge=0, allow_inf_nan=False)],
        "algorithm.lr_end_factor algorithm.clip_final algorithm.value_coef",
    ),
    **_each(Annotated[float, Field(ge=0, le=1)], "algorithm.gamma algorithm.gae_lambda algorithm.vtrace_lambda"),
    **_each(Annotated[float, Field(allow_inf_nan=False)], "env.solved_at algorithm.entropy_coef"),
    **_each(Annotated[int, Field(ge=0, lt=2**63)], "seed"),  # what torch, numpy and Gymnasium all take
    **_each(Annotated[int, Field(ge=1, le=1024)], "threads"),  # OpenMP crashes if it cannot start so many
    **_each(Annotated[int, Field(ge=0, le=65535)], "collector.port"),
    **_each(Annotated[str, Field(min_length=1)], "weight_sync.host collector.host"),
    **_each(Literal["update", "epoch"], "sync_each"),
    **_each(Literal["tanh", "relu", "elu", "silu"], "policy.activation"),
    **_each(Literal["online", "offline", "disabled"], "logger.mode"),
}
"""What each setting may be, beyond its type; None is possible wherever the type allows it."""


_ELSEWHERE_CALLED = {"learning_rate": "lr", "n_steps": "frames_per_batch", "total_timesteps": "total_frames"} | {
    "batch_size": "minibatch_size", "clip_range": "clip", "ent_coef": "entropy_coef", "n_envs": "num_envs"
}  # fmt: skip
COMPILED_FROM = 10_000  # gradient steps: compiling takes ten seconds or so, and saves a millisecond of each


def repays_compiling(config: TrainConfig) -> bool:
    """Return whether the gradient steps that a run plans, on the CPU, repay compiling them."""
    frames_each = min(config.algorithm.minibatch_size, config.frames_per_batch)
    return config.device == "cpu" and config.algorithm.epochs * config.total_frames / frames_each >= COMPILED_FROM


def check(config: TrainConfig, settings: Collection[str]) -> None:
    """Raise ConfigError for a setting that is not among `settings`, is out of range, or contradicts another one."""
    for name, value in _values(config, settings):
        if name in LIMITS and value is not None:
            try:
                LIMITS[name].validate_python(value)
            except ValidationError as error:
                said = error.errors()[0]["msg"].replace("Input should", "it has to")
                raise ConfigError(f"{name}={value}: {said}") from error
    rows = config.num_envs * (config.num_workers if getattr(config.collector, "sync", True) else 1)
    if (given := config.frames_per_batch) < rows:
        raise ConfigError(f"frames_per_batch={given}: a batch has at least one frame of each of {rows} environments")
    joins = getattr(config.collector, "cat_results", "stack")
    if joins != "stack" and not (config.num_envs > 1 and joins in (0, -2)):
        raise ConfigError(f"collector.cat_results={joins}: it has to be stack, or 0 where num_envs is above 1")
    late = [name for name, value in vars(config).items() if name.startswith("staleness") and value]
    if late and config.sync_each == "epoch":
        raise ConfigError(f"{late[0]} counts updates: it cannot be combined with sync_each=epoch")
    if "staleness_from" in late and len(late) > 1:
        raise ConfigError("staleness_from has the delays: it cannot be combined with staleness or staleness_spread")
    try:
        objective_of(summary_without_frames(), config.objective)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _values(config: Any, settings: Collection[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each setting, and of each element of a list."""
    known = {field.name for field in fields(config)}
    for name, value in vars(config).items():
        if name not in known:  # by an override with a +, which Hydra accepts for any name
            raise ConfigError(f"no setting is called '{prefix}{name}'{did_you_mean(prefix + name, settings)}")
        if is_dataclass(value):
            yield from _values(value, settings, f"{prefix}{name}.")
        else:
            yield from ((f"{prefix}{name}", one) for one in (value if isinstance(value, list) else [value]))


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return "; did you mean …?" with the same name in another group, or else one that is spelt similarly."""
    last = _ELSEWHERE_CALLED.get(last := re.split("[./]", name)[-1], last)
    elsewhere = [one for one in known if re.split("[./]", one)[-1] == last]
    close = get_close_matches(name, elsewhere, n=1, cutoff=0.0) or get_close_matches(name, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
