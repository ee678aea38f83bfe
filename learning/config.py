"""The config of a training run; its command line, errors, folders, and the report of a sweep."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field, fields, make_dataclass
from functools import cache
from io import TextIOWrapper
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from hydra.utils import get_object
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import collectors.config
import wsync.config
from collectors.errors import ConfigError
from learning import validation
from learning.actor_critic import Diverged, UnusableBatch
from learning.checkpoint import CheckpointError
from learning.config_errors import CONF, Parameters, one_line
from learning.help import print_help
from learning.options import PolicyConfig, TrainConfig
from learning.reporting.files import FolderError
from learning.reporting.guarded import ReporterError
from learning.reporting.sweep import report
from learning.resuming import (
    SettingsFiles,
    compose_with,
    config_folders,
    is_override,
    override_name,
    with_earlier_overrides,
    with_earlier_settings,
)
from learning.run import claimed, interrupt_by_signals, run_command
from wsync import WeightSyncError, WorkerDied

_OF_HYDRA = (HydraException, OmegaConfBaseException, YAMLError)
_EXPECTED = (
    *_OF_HYDRA, CheckpointError, ConfigError, Diverged, FolderError, ReporterError, UnusableBatch, WeightSyncError,
)  # fmt: skip


class RunFolders(Callback):
    """Hydra's callback that refuses used folders, and reports on a sweep after its last run.

    Hydra does not call it at the end of a sweep in which a run has failed: `run_command` calls `write` then.
    """

    _pending: ClassVar[list[Path]] = []
    _claims: ClassVar[list[TextIOWrapper]] = []

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Refuse a folder that has the files of another run, before Hydra writes into it."""
        HydraConfig.instance().set_config(config)  # the default folder's name has ${hydra:…}; Hydra sets it later
        folder = Path(config.hydra.run.dir)
        resume = config.get("resume")
        if resume and Path(resume).resolve() == folder.resolve():
            self._claim(folder, None, _used(f"the run in {folder} has not ended", "wait for its end"))
        else:
            refused = _used(f"hydra.run.dir={folder} has a run already", f"continue that one by resume={folder}")
            self._claim(folder, "metrics.jsonl", refused)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Refuse a folder that has runs of another sweep; prepare for the end of this one."""
        folder = Path(config.hydra.sweep.dir)
        refused = _used(f"hydra.sweep.dir={folder} has runs already", "leave it out for a new folder")
        self._claim(folder, "*/**/metrics.jsonl", refused)
        interrupt_by_signals(folder, wait_for_runs="joblib" in config.hydra.launcher._target_)
        self._pending.append(folder)

    @classmethod
    def _claim(cls, folder: Path, files: str | None, refused: SystemExit) -> None:
        """Raise `refused` if `folder` has `files`, or another process, which may have begun this second, has it."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            claim = claimed(folder, refused)  # closed by `release`
        except OSError as error:  # Hydra turns an ``Exception`` of a callback into a warning
            raise SystemExit(f"{Path(sys.argv[0]).name}: {error}") from error
        cls._claims.append(claim)
        if files is not None and any(folder.glob(files)):
            raise refused

    @classmethod
    def release(cls) -> None:
        """Remove the claims of this process, at its end: from then on the files of its runs are the sign of use."""
        while cls._claims:
            with cls._claims.pop() as claim:
                Path(claim.name).unlink(missing_ok=True)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Report on the sweep."""
        self.write()

    @classmethod
    def write(cls) -> None:
        """Print the table and write the report of a sweep that has none yet; nothing if no run has ended in it.

        A report that cannot be written is a line on stderr, not an error: the errors of runs come first.
        """
        while cls._pending:
            folder = cls._pending.pop()
            if any(folder.glob("*/**/summary.json")):
                try:
                    report(folder)
                except FolderError as error:
                    print(f"no report of the sweep: {error}", file=sys.stderr)  # Hydra has removed its log handlers


def _used(what: str, instead: str) -> SystemExit:
    """Return the error of a used folder."""
    return SystemExit(
        f"{Path(sys.argv[0]).name}: {what}: its files would be overwritten; name another one, or {instead}"
    )


def run_hydra(main: Callable[[], Any]) -> NoReturn:
    """Call `main`, a function decorated by ``hydra.main``, and end the process; see ``learning.run.run_command``."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors instead of printing them

    def command() -> None:
        register_configs(config_folders(sys.argv[1:]))
        if {"--help", "-h"}.isdisjoint(sys.argv):
            # Options first: argparse takes overrides only in one piece.
            sys.argv[1:] = sorted(with_earlier_overrides(sys.argv[1:]), key=is_override)
            main()
        else:
            given = [argument for argument in sys.argv[1:] if is_override(argument)]
            print_help(CONF, given, config_folders(sys.argv[1:]))

    try:
        run_command(command, describe_error, on_error=RunFolders.write)
    finally:
        RunFolders.release()


def describe_error(error: BaseException) -> str | None:
    """Return an error that a user can act on in one line, and one for each of its notes; None for any other error."""
    if not isinstance(error, _EXPECTED):
        return None
    chosen = {override_name(argument): argument.partition("=")[2] for argument in sys.argv[1:] if "=" in argument}
    if isinstance(error, _OF_HYDRA):
        message = one_line(error, settings(), chosen, _own_parameters(config_folders(sys.argv[1:])))
    else:
        message = str(error)
    return "\n".join([message, *getattr(error, "__notes__", ())])


def _own_parameters(folders: Sequence[Path]) -> Parameters:
    """Return the parameters of what YAML files of the user's name by ``_target_``; empty if the options do not compose.

    Args:
        folders: config folders of the user.
    """
    groups = {*settings(), "experiment"}
    choices = [one for one in sys.argv[1:] if is_override(one) and override_name(one) in groups]
    try:
        cfg = compose_with(folders, choices)
    except _OF_HYDRA:
        return {}
    found: dict[str, tuple[str, list[str]]] = {}
    for group, node in ((str(name), cfg[name]) for name in cfg if isinstance(cfg[name], DictConfig)):
        if OmegaConf.get_type(node) is dict and (target := node.get("_target_")) is not None:
            try:
                names = validation.own_settings(group, get_object(target))
            except (ImportError, TypeError, ValueError):  # reported when the option is used
                continue
            found[group] = ("", [str(name) for name in node]) if names is None else (target, names)
    return found


def settings() -> dict[str, list[str]]:
    """Return all settings, each with the options of its group that have it: ``{"policy.hidden": ["mlp"], …}``."""
    names: dict[str, list[str]] = {field.name: [] for field in fields(TrainConfig)}
    for group, options in ConfigStore.instance().repo.items():
        if group in names and isinstance(options, dict):
            configs = {option.removeprefix("base_"): one for option, one in options.items() if option[:5] == "base_"}
            for option, stored in {**configs, **options.get("schema", {})}.items():
                for name in set(stored.node) - {"_target_"}:
                    names.setdefault(f"{group}.{name}", []).append(option.removesuffix(".yaml"))
    return names


def resolved(composed: DictConfig, run: HydraConf) -> tuple[TrainConfig, SettingsFiles]:
    """Return the checked config of a run, with that of the run it resumes, and what writes it into the run's folder.

    Raises:
        ConfigError: see ``learning.validation.check``.
    """
    validation.check_backend(OmegaConf.select(composed, "weight_sync._target_"))
    merged = with_earlier_settings(composed, run.overrides.task, run.runtime.choices, config_folders(sys.argv[1:]))
    cfg = OmegaConf.to_object(merged)
    assert isinstance(cfg, TrainConfig)
    validation.check(cfg, settings())
    if run.mode is RunMode.MULTIRUN and getattr(cfg.logger, "group", "") is None:  # only wandb's logger has a group
        cfg.logger.group = "-".join(Path(run.sweep.dir).parts[-2:])
    return cfg, SettingsFiles(merged, run)


def facts(cfg: TrainConfig) -> dict[str, Any]:
    """Return the settings in the summary of a run."""
    overrides = _as_typed(HydraConfig.get().overrides.task)
    counts = {"num_workers": cfg.num_workers, "num_envs": cfg.num_envs}
    return {"env": cfg.env.id, "seed": cfg.seed, **counts, "overrides": overrides}


def line_prefix(run: HydraConf) -> str:
    """Return what begins each line of a run in a sweep that runs several at once: its number; else nothing."""
    parallel = run.mode is RunMode.MULTIRUN and not str(run.launcher["_target_"]).endswith("BasicLauncher")
    return f"[{run.job.num}] " if parallel else ""


@contextmanager
def failure_advice(collector: Any) -> Iterator[None]:
    """Add to the error of a worker that has died inside how a run continues without it."""
    try:
        yield
    except WorkerDied as error:
        if getattr(collector, "on_worker_failure", None) == "raise":  # a collector in one process has no such setting
            error.add_note("collector.on_worker_failure=restart (or drop) continues after the death of a worker")
        raise


def env_option() -> str | None:
    """Return the option of ``env`` that was chosen; None if ``env.id`` was given."""
    run = HydraConfig.get()
    by_id = any(override_name(one) == "env.id" for one in run.overrides.task)
    return None if by_id else run.runtime.choices["env"]


def choice_in_words(cfg: TrainConfig) -> str:
    """Return the choice of the policy and the environment as in a command line: ``policy=lstm with env=cartpole``."""
    env = f"env.id={cfg.env.id}" if (option := env_option()) is None else f"env={option}"
    return f"policy={HydraConfig.get().runtime.choices['policy']} with {env}"


def _as_typed(overrides: Sequence[str]) -> list[str]:
    """Return `overrides` without the escapes that the launcher of a sweep adds to values, of colons among others."""
    parser = OverridesParser.create()
    values = [None if text.startswith("~") else parser.parse_override(text).value() for text in overrides]
    return [
        f"{text.partition('=')[0]}={value}" if isinstance(value, str) else text
        for text, value in zip(overrides, values, strict=True)
    ]


@cache
def config_of(target: str, base: type = object, **defaults: Any) -> type:
    """Return the structured config of a class: its arguments that have a default, and the fields of `base`.

    Args:
        target: dotted name of the class.
        base: a dataclass, the config of what all classes of the group have.
        **defaults: replace those of `base`.
    """
    made = wsync.config.config_of(target)
    options = [(one.name, one.type, field(default=one.default)) for one in fields(made) if one.default != MISSING]
    options += [(name, type(value), field(default=value)) for name, value in defaults.items()]
    own = make_dataclass(made.__name__, options, bases=(base,))
    own.__doc__, own.__module__ = f"See ``{target}``.", __name__
    return own


def register_configs(folders: Sequence[Path] = ()) -> None:
    """Add all configs to Hydra's ConfigStore, the backends' as well; `folders` are config folders of the user."""
    wsync.config.register_configs({"timeout": "${timeout}"}, folders=[CONF, *folders])
    collectors.config.register_configs()
    wsync.config.store_once(None, "base_train", TrainConfig)
    for name in ("mlp", "cnn", "rnn"):
        made = config_of(f"learning.{name.upper()}", PolicyConfig, shared=name != "mlp")
        wsync.config.store_once("policy", f"base_{name}", made)
    for name in ("ppo", "impala"):
        wsync.config.store_once("algorithm", f"base_{name}", config_of(f"learning.{name.upper()}"))
    wsync.config.store_once("chaos", "base_chaos", config_of("collectors.chaos.Monkey"))
    wsync.config.store_once("logger", "base_wandb", config_of("learning.reporting.wandb_logger.WandbLogger"))
    wsync.config.store_once("logger", "base_none", config_of("learning.reporting.Reporter"))
