"""Structured configs of a training run, and what of them makes sense together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.config_store import ConfigStore
from hydra.experimental.callback import Callback
from omegaconf import MISSING, DictConfig, OmegaConf

from collectors.config import ConfigError, MultiAsyncConfig, MultiSyncConfig, RemoteConfig
from collectors.environments.specs import Spec
from learning.complaints import unknown
from learning.limits import refuse_out_of_range
from learning.networks import ACTIVATIONS
from learning.reporting.sweep import report
from wsync.config import store_once


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
        """Report on the sweep that has not been reported on, if there is one; see `on_multirun_end`."""
        while cls._under_way:
            folder = cls._under_way.pop()
            if any(folder.glob("*/summary.json")):
                report(folder)


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
    if isinstance(config.collector, MultiSyncConfig | RemoteConfig):
        how, time = config.collector.cat_results, 0 if config.num_envs == 1 else 1
        if how in (time, -1):
            raise ConfigError(
                f"collector.cat_results={how} joins the workers' batches along time, as if one's frames came after "
                f"another's: say stack{', or 0' if time else ''}"
            )
    workers = 1 if _is_asynchronous(config.collector) else config.num_workers  # whose frames make a batch
    rows = workers * config.num_envs
    if config.frames_per_batch < rows:
        of = "num_envs" if workers == 1 else f"num_workers × num_envs = {workers} × {config.num_envs}"
        raise ConfigError(
            f"frames_per_batch={config.frames_per_batch} is less than one frame for each of {of} = {rows} environments"
        )
    if config.policy.activation not in ACTIVATIONS:
        raise ConfigError(f"policy.activation={config.policy.activation}: it is one of {', '.join(ACTIVATIONS)}")


def _added(config: Any, prefix: str = "") -> Iterator[str]:
    known = {field.name for field in fields(config)}
    for name, value in vars(config).items():
        if name not in known:
            yield f"{prefix}{name}"
        elif is_dataclass(value):
            yield from _added(value, f"{prefix}{name}.")


def _is_asynchronous(collector: Any) -> bool:
    return isinstance(collector, MultiAsyncConfig) or (isinstance(collector, RemoteConfig) and not collector.sync)


def observation_dim(env_id: str, spec: Spec) -> int:
    """Return the length of an observation that a policy can read.

    Raises:
        ConfigError: it is no vector of floats (an image, say).
    """
    if len(spec.shape) != 1 or not spec.dtype.is_floating_point:
        raise ConfigError(
            f"env.id={env_id}: the policy reads a vector of floats, and an observation is {spec.dtype} of shape "
            f"{list(spec.shape)}: register the environment with wrappers that make it one (FlattenObservation, "
            "RescaleObservation)"
        )
    return spec.shape[0]


def check_action(env_id: str, spec: Spec) -> None:
    """Refuse an action that no policy gives.

    Raises:
        ConfigError: it is neither a choice nor a vector.
    """
    if len(spec.shape) != 1:
        raise ConfigError(
            f"env.id={env_id}: the policy gives a choice or a vector, and an action is of shape {list(spec.shape)}: "
            "register the environment with a wrapper that makes it one (TransformAction)"
        )


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
    earlier = [text for text in map(str, OmegaConf.load(_stored(folder, "overrides"))) if _name(text) not in given]
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
    for name in {_name(override) for override in overrides if "=" in override} - set(choices):
        OmegaConf.update(kept, name, OmegaConf.select(cfg, name), force_add=True)
    return kept


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
