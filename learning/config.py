"""The config of a training run; its command line, errors, folders, and the report of a sweep."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import collectors.config
import wsync.config
from collectors.errors import ConfigError
from collectors.output import keep_output_harmless
from learning.actor_critic import Diverged, UnusableBatch
from learning.checkpoint import CheckpointError
from learning.options import PolicyConfig, TrainConfig, check, did_you_mean
from learning.reporting.files import METRICS, FolderError
from learning.reporting.sweep import report
from learning.resuming import config_folders, is_override, with_earlier_overrides
from wsync import WeightSyncError

CONF = Path(__file__).resolve().parents[1] / "conf"  # the folder of the project's configs
TRACEBACKS = "HYDRA_FULL_ERROR" in os.environ  # set by the user; `run_hydra` sets it for Hydra afterwards
_NOISE = ("full_key", "object_type", "reference_type", "See http", "To append")
_OF_HYDRA = (HydraException, OmegaConfBaseException, YAMLError)
_EXPECTED = (CheckpointError, ConfigError, Diverged, FolderError, UnusableBatch, WeightSyncError)


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
    for name in ("wandb_logger.WandbLogger", "files.TensorBoardLogger", "Reporter"):
        short = name.partition(".")[2].lower().removesuffix("logger") or "none"
        wsync.config.store_once("logger", f"base_{short}", config_of(f"learning.reporting.{name}"))


def run_name(choices: Mapping[str, str], seed: int, env_id: str) -> str:
    """Return the name of a run's folder: the environment's, the backend's, and the seed."""
    return f"{re.split('[/:]', env_id or choices['env'])[-1]}-{choices['weight_sync']}-s{seed}"


OmegaConf.register_new_resolver("run_name", run_name, replace=True)  # here: also in the processes of a launcher


@cache
def config_of(target: str, base: type = object, **defaults: Any) -> type:
    """Return the structured config of a class: its arguments that have a default, and the fields of `base`.

    `defaults` replace those of `base`, which is the config of what all classes of the group have.
    """
    made = wsync.config.config_of(target)
    options = [(one.name, one.type, field(default=one.default)) for one in fields(made) if one.default != MISSING]
    options += [(name, type(value), field(default=value)) for name, value in defaults.items()]
    own = make_dataclass(made.__name__, options, bases=(base,))
    own.__doc__, own.__module__ = f"The options of ``{target}``.", __name__
    return own


def settings() -> list[str]:
    """Return the names of all settings: those of the run, and ``group.name`` of each option of a group."""
    names = [field.name for field in fields(TrainConfig)]
    stored = ConfigStore.instance().repo
    for group in [name for name in names if name in stored]:
        configs = [*stored[group].items(), *stored[group].get("schema", {}).items()]
        nodes = [one.node for name, one in configs if name.endswith(".yaml")]
        names += dict.fromkeys(f"{group}.{name}" for node in nodes for name in map(str, node) if name[0] != "_")
    return names


def resolved(composed: DictConfig, run: HydraConf) -> TrainConfig:
    """Return the checked config of a run; raises ConfigError."""
    cfg = OmegaConf.to_object(composed)
    if not isinstance(cfg, TrainConfig):
        raise ConfigError("--config-path: to repeat a run, give its overrides.yaml again; resume=<folder> continues it")
    check(cfg, settings())
    if run.mode is RunMode.MULTIRUN and hasattr(cfg.logger, "group"):  # wandb's logger
        if cfg.logger.group is None and "WANDB_RUN_GROUP" not in os.environ:
            cfg.logger.group = "-".join(Path(run.sweep.dir).parts[-2:])
        if getattr(cfg.logger, "id", "") is None and "WANDB_RUN_ID" in os.environ:
            cfg.logger.id = f"{os.environ['WANDB_RUN_ID']}-{run.job.num}"
    return cfg


def folders_named(run: HydraConf) -> list[str]:
    """Return the config folders that the command line of a run has named; there is at most one."""
    return [source.path for source in run.runtime.config_sources if source.provider == "command-line"]


def line_prefix(run: HydraConf) -> str:
    """Return what begins each line of a run in a sweep that runs several at once: its number; else nothing."""
    parallel = run.mode is RunMode.MULTIRUN and not str(run.launcher["_target_"]).endswith("BasicLauncher")
    return f"[{run.job.num}] " if parallel else ""


class RunFolders(Callback):
    """Hydra's callback that refuses used folders, and reports on a sweep after its last run.

    Hydra does not call it at the end of a sweep in which a run has failed: `run_hydra` calls `write` then.
    """

    _pending: ClassVar[list[Path]] = []

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Refuse a folder that has the files of another run, before Hydra writes into it."""
        HydraConfig.instance().set_config(config)  # the default folder's name has ${hydra:…}; Hydra sets it later
        folder, resume = Path(config.hydra.run.dir), config.get("resume")
        if not resume or Path(resume).resolve() != folder.resolve():
            _refuse_used(folder, METRICS, f"hydra.run.dir={folder} has a run already", f"resume={folder} continues it")

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Refuse a folder that has runs of another sweep; prepare for the end of this one."""
        folder = Path(config.hydra.sweep.dir)
        used = f"hydra.sweep.dir={folder} has runs already"
        _refuse_used(folder, f"*/**/{METRICS}", used, "leave it out for a new folder")
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a launcher ends its processes as well
        self._pending.append(folder)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        self.write()

    @classmethod
    def write(cls) -> None:
        """Print the table and write the report of a sweep that has none yet; its error is only a line on stderr."""
        for folder in [one for one in cls._pending if any(one.glob("*/**/summary.json"))]:
            cls._pending.remove(folder)
            try:
                report(folder)
            except FolderError as error:
                print(f"no report of the sweep: {error}", file=sys.stderr)  # Hydra has removed its log handlers


def _refuse_used(folder: Path, files: str, used: str, instead: str) -> None:
    """End the process if `folder` has `files`, or cannot be made. Hydra would only warn of an ``Exception``."""
    program = Path(sys.argv[0]).name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"{program}: {error}") from error
    if any(folder.glob(files)):
        raise SystemExit(f"{program}: {used}: its files would be overwritten; name another one, or {instead}")


def run_hydra(main: Callable[[], Any]) -> NoReturn:
    """Call `main`, a function decorated by ``hydra.main``, and end the process.

    An error that a user can act on is one line on stderr, or a traceback if HYDRA_FULL_ERROR is set. Exit statuses: 1
    after an error, 130 after Ctrl-C.
    """
    keep_output_harmless()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors instead of printing them
    try:
        register_configs(config_folders(sys.argv[1:]))
        if "--help-all" in sys.argv:
            sys.argv[1:] = ["--help", "hydra/help=all", *(one for one in sys.argv[1:] if one != "--help-all")]
        # Options first: argparse takes overrides only in one piece.
        sys.argv[1:] = sorted(with_earlier_overrides(sys.argv[1:]), key=is_override)
        main()
    except BaseException as error:  # also Ctrl-C and SystemExit: the report of a sweep is written first
        RunFolders.write()
        if isinstance(error, KeyboardInterrupt):
            sys.stdout.flush()
            os._exit(128 + signal.SIGINT)  # without exit handlers: those of other libraries may wait for a server
        message = describe_error(error)
        if message is None or TRACEBACKS:
            raise
        sys.exit(f"{Path(sys.argv[0]).name}: {message}")
    sys.exit(0)


def describe_error(error: BaseException) -> str | None:
    """Return an error that a user can act on in one line, and one for each of its notes; None for any other error."""
    if isinstance(error, _OF_HYDRA):
        message = one_line(error)
    elif isinstance(error, _EXPECTED):
        message = str(error)
    elif "Config group override must be a string" in str(error):  # a ValueError of Hydra's
        message = f"{' '.join(one for one in sys.argv if one.endswith('=null'))}: say one of the options, not null"
    else:
        return None
    return "\n".join([message, *getattr(error, "__notes__", ())])


def one_line(error: BaseException) -> str:
    """Return what an error of Hydra or OmegaConf says, in one line; after a misspelt name, with a suggestion."""
    text = f"{error}\n{error.__cause__ or ''}"
    if found := re.search(r"Could not find '(.+?)'", text):
        return _no_such_option(found[1], text)
    lines = [line.strip().rstrip(".") for line in text.splitlines()]
    message = ": ".join(dict.fromkeys(line for line in lines if line and not line.startswith(_NOISE)))
    if key := re.search(r"full_key: (\S+)", text):
        named = f"{key[1]} has no default: add {key[1]}=…" if "mandatory" in text else f"{key[1]}: {message}"
        message = message if key[1] in message else named
    if found := re.match(r"Could not override '(.+?)'", text):
        name = found[1]
        if "is not in struct" in text:  # a dictionary without a schema
            there = [str(one) for one in getattr(error.__cause__, "parent_node", ())]
            return f"{message}{did_you_mean(name.rpartition('.')[2], there)}; say +{name}=… to add it"
        if name in settings():
            return f"'{name}' is a setting of another option of {name.partition('.')[0]} than the chosen one"
        return f"no setting is called '{name}'{did_you_mean(name, settings())}"
    return f"this override cannot be read: {message}" if "override_grammar" in text else message


def _no_such_option(path: str, text: str) -> str:
    group, _, name = path.rpartition("/")
    options = [line.strip() for line in text.splitlines() if line.startswith("\t") and "provider=" not in line]
    options = [one for one in options if not one.startswith("base_")]
    options += sorted(f"{path.parent.name}/{path.stem}" for path in (CONF / group).glob("*/*.yaml"))
    return f"{group}={name}: there is no such option{did_you_mean(name, options)}; there are: {', '.join(options)}"
