"""Structured configs of a training run, and how a run is resumed with those that it had."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import MISSING, DictConfig, OmegaConf

from collectors.config import ConfigError
from learning.checks import refuse_contradictions
from learning.complaints import unknown
from learning.limits import refuse_out_of_range
from learning.reporting.files import FolderError
from learning.reporting.sweep import report
from wsync.config import store_once

_CONF = Path(__file__).resolve().parents[1] / "conf"


@dataclass
class PolicyConfig:
    """Networks of the policy and of the critic; see ``learning.make_policy``."""

    hidden: list[int] = field(default_factory=lambda: [64, 64])
    activation: str = "tanh"
    initial_std: float = 1.0


@dataclass
class PPOConfig:
    """See ``learning.PPO`` for what each of them means."""

    _target_: str = "learning.PPO"
    gamma: float = 0.99
    gae_lambda: float = 0.95
    reward_scale: float = 1.0
    epochs: int = 10
    epochs_final: int | None = None
    minibatch_size: int = 256
    lr: float = 3e-4
    lr_final: float | None = None
    clip: float = 0.2
    clip_final: float | None = None
    anneal_frames: int = 100_000
    value_coef: float = 0.5
    value_clip: float | None = None
    entropy_coef: float = 0.0
    max_grad_norm: float = 0.5
    target_kl: float | None = None
    normalize_advantage: bool = True
    adam_eps: float = 1e-5


@dataclass
class NoLoggerConfig:
    """No dashboard: the run's folder is all there is."""

    _target_: str = "learning.reporting.Reporter"


@dataclass
class WandbConfig:
    """See ``learning.reporting.wandb_logger.WandbLogger``."""

    _target_: str = "learning.reporting.wandb_logger.WandbLogger"
    project: str = "wsync"
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    mode: str | None = None
    start_after: float = 10.0
    close_within: float = 60.0


@dataclass
class TrainConfig:
    """A training run. What Hydra composes from ``conf/train.yaml``; the groups are structured configs of their own.

    Attributes:
        num_workers: processes that collect.
        num_envs: environments in each of them, stepped together.
        frames_per_batch: over all workers and environments (of one worker, if they do not wait for each other); the
            weights are sent once per batch.
        total_frames: the run ends with the batch that reaches them, at the latest.
        stop_when_solved: end as soon as the mean of the last 100 returns reaches ``env.solved_at``.
        seed: of everything; a resumed run goes on with other random numbers, made from it and the frames so far.
        timeout: seconds that connecting and sending weights may take; None: for ever.
        threads: of torch, in the trainer.
        checkpoint_every: seconds.
        resume: folder of an earlier run to go on from.
    """

    num_workers: int = 2
    num_envs: int = 16
    frames_per_batch: int = 1024
    total_frames: int = MISSING
    stop_when_solved: bool = True
    seed: int = 0
    timeout: float | None = 60.0
    threads: int = 1
    checkpoint_every: float = 60.0
    resume: str | None = None
    weight_sync: Any = MISSING
    collector: Any = MISSING
    env: Any = MISSING
    policy: Any = MISSING
    algorithm: Any = MISSING
    logger: Any = MISSING
    chaos: Any = MISSING


class SweepReport(Callback):
    """Hydra's callback that reports on a sweep when its last run has ended.

    Hydra does not tell of the end of a sweep in which a run has failed: `make_up` is for that.
    """

    _under_way: ClassVar[list[Path]] = []

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Remember the sweep's folder."""
        self._under_way.append(Path(config.hydra.sweep.dir))

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Print the table, and write the report into the sweep's folder; nothing if no run came to an end."""
        self.make_up()

    @classmethod
    def make_up(cls) -> None:
        """Report on the sweep that has not been reported on, if there is one; see `on_multirun_end`.

        That there can be no report is told, and not raised: the runs are what they are, and their errors come first.
        """
        while cls._under_way:
            folder = cls._under_way.pop()
            if any(folder.glob("*/summary.json")):
                try:
                    report(folder)
                except FolderError as error:
                    print(f"no report of the sweep: {error}", file=sys.stderr)  # Hydra has put its loggers away


def settings() -> dict[str, list[str]]:
    """Return all settings that an override may name, and which options have them: ``{"policy.hidden": ["mlp"], …}``.

    One at top level belongs to no option.
    """
    names: dict[str, list[str]] = {field.name: [] for field in fields(TrainConfig)}
    for group, options in ConfigStore.instance().repo.items():
        if group in names and isinstance(options, dict):
            for option, stored in options.items():
                for name in set(stored.node) - {"_target_"}:
                    base = option.removeprefix("base_").removesuffix(".yaml")
                    names.setdefault(f"{group}.{name}", []).append(base)
    return names


def check(config: TrainConfig) -> None:
    """Refuse what cannot be, before anything is started.

    Raises:
        ConfigError: for the first thing found.
    """
    for name in _added(config):  # with a +, which Hydra allows; nobody would read it
        raise ConfigError(unknown(name, settings()))
    refuse_out_of_range(config)
    refuse_contradictions(config)


def _added(config: Any, prefix: str = "") -> Iterator[str]:
    known = {field.name for field in fields(config)}
    for name, value in vars(config).items():
        if name not in known:
            yield f"{prefix}{name}"
        elif is_dataclass(value):
            yield from _added(value, f"{prefix}{name}.")


def stored_overrides(argv: Sequence[str]) -> list[str]:
    """Return the command line `argv`, with that of the run that it resumes (``resume=<folder>``) put into it.

    So that groups which the earlier run chose are chosen again; what `argv` says itself wins.

    Raises:
        ConfigError: if that folder is not a run's, or a group is to be null, which Hydra would not say.
    """
    groups = {field.name for field in fields(TrainConfig) if field.type == "Any"} | {"experiment"}
    for argument in argv:
        if argument in {f"{group}=null" for group in groups}:
            raise ConfigError(f"{argument}: say one of the options that --help lists; none, where there is one, is off")
    given = {_name(argument): i for i, argument in enumerate(argv) if "=" in argument}
    folder = argv[given["resume"]].partition("=")[2].strip("'\"") if "resume" in given else ""
    if folder in ("", "null"):
        return list(argv)
    if "," in folder and not Path(folder).exists():
        raise ConfigError(f"resume={folder}: it is one run's folder, and is not swept over; resume them one by one")
    replaced = set(given)
    for name in groups & given.keys():
        replaced |= _also_set(name, argv[given[name]].partition("=")[2])
    earlier = [text for text in map(str, OmegaConf.load(_stored(folder, "overrides"))) if _name(text) not in replaced]
    return [*argv[: given["resume"]], *earlier, *argv[given["resume"] :]]


def resumed(cfg: DictConfig, overrides: Sequence[str], choices: Mapping[str, str | None]) -> DictConfig:
    """Return `cfg` as it was in the run that it resumes, except for what `overrides` name and groups chosen anew.

    Args:
        cfg: composed from today's defaults.
        overrides: those that `cfg` was composed with, `stored_overrides` among them.
        choices: today's option of each group.
    """
    if cfg.resume is None:
        return cfg
    stored = OmegaConf.to_container(OmegaConf.load(_stored(cfg.resume, "config")), resolve=False)
    before = OmegaConf.load(_stored(cfg.resume, "hydra")).hydra.runtime.choices
    assert isinstance(stored, dict)
    anew = {group for group, choice in choices.items() if before.get(group) != choice}
    kept = OmegaConf.merge(cfg, {name: value for name, value in stored.items() if name not in anew})
    assert isinstance(kept, DictConfig)
    said = {_name(override) for override in overrides if "=" in override} - set(choices)
    for group in anew:
        said |= _also_set(group, choices[group])
    for name in said:
        OmegaConf.update(kept, name, OmegaConf.select(cfg, name), force_add=True)
    return kept


def _also_set(group: str, option: str | None) -> set[str]:
    """Return the settings beside its own group that an option brings along (``collector=single`` has one worker)."""
    path = _CONF / group / f"{option}.yaml"
    if not path.is_file() or not path.read_text(encoding="utf-8").startswith("# @package _global_"):
        return set()
    content = OmegaConf.load(path)
    assert isinstance(content, DictConfig)
    names: set[str] = set()
    for name, value in content.items():
        if name not in ("defaults", "hydra"):
            names |= {f"{name}.{key}" for key in value} if isinstance(value, DictConfig) else {str(name)}
    return names


def as_typed(overrides: Sequence[str]) -> list[str]:
    """Return `overrides` without what the launcher of a sweep escapes in their values, a colon among others."""
    parser = OverridesParser.create()
    values = [None if text.startswith("~") else parser.parse_override(text).value() for text in overrides]
    return [
        f"{text.partition('=')[0]}={value}" if isinstance(value, str) else text
        for text, value in zip(overrides, values, strict=True)
    ]


def _name(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _stored(folder: str, name: str) -> Path:
    path = Path(folder) / ".hydra" / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"resume={folder}: no run is stored there, {path} is missing")
    return path


def register_configs() -> None:
    """Add the run, and the groups policy, algorithm and logger, to Hydra's ConfigStore, as ``base_<name>``."""
    store_once(None, "base_train", TrainConfig)
    store_once("policy", "base_mlp", PolicyConfig)
    store_once("algorithm", "base_ppo", PPOConfig)
    store_once("logger", "base_wandb", WandbConfig)
    store_once("logger", "base_none", NoLoggerConfig)
