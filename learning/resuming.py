"""A run that continues another one (``resume=<folder>``): its command line, and its config."""

from __future__ import annotations

import logging
import re
import shlex
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from collectors.errors import ConfigError
from learning.config_errors import CONF
from learning.options import TrainConfig
from learning.reporting import Reporter
from learning.reporting.files import reading, relative_path, replace_file, writing

_log = logging.getLogger(__name__)
_SETTINGS = "resume"  # with .yaml, in the folder .hydra of a run; see ``SettingsFiles``


def is_override(argument: str) -> bool:
    """Return whether an argument of the command line is an override: ``name=value``, or ``~name`` for a deletion."""
    return argument[:1] == "~" or ("=" in argument and argument[:1] != "-")


def override_name(override: str) -> str:
    """Return the name of the setting that an override sets or deletes."""
    return override.partition("=")[0].lstrip("+~")


def config_folders(argv: Sequence[str]) -> list[Path]:
    """Return the user's config folder, if the command line `argv` has one."""
    parser = ArgumentParser(add_help=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    folder = parser.parse_known_args(argv)[0].config_dir
    return [] if folder is None else [folder]


def config_folders_of(folder: Path) -> list[str]:
    """Return the user's config folder that the run in `folder` had, if it had one."""
    path = folder / ".hydra" / f"{_SETTINGS}.yaml"
    return list(read_yaml(path).get("config_folders") or ()) if path.is_file() else []


def read_yaml(path: Path) -> DictConfig:
    """Return the content of one of a run's YAML files.

    Raises:
        FolderError: it is missing or damaged; the message has the path and the reason.
    """
    with reading(path):
        try:
            content = OmegaConf.load(path)
        except (YAMLError, OmegaConfBaseException) as error:
            raise ValueError(" ".join(str(error).split())) from error
        if not isinstance(content, DictConfig):
            raise ValueError("it has no settings")
        return content


def compose_with(folders: Sequence[Path], overrides: Sequence[str], **options: Any) -> DictConfig:
    """Return the config that `overrides` compose, with the user's config folders; see ``hydra.compose``."""
    searched = [f"hydra.searchpath=['{one.resolve()}']" for one in folders]
    started = GlobalHydra.instance().is_initialized()  # inside `main`
    with nullcontext() if started else initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", [*searched, *overrides], **options)


def resume_command(script: str, run: HydraConf) -> str:
    """Return the command that continues a run of `script`, without the folder of the run at its end.

    The command line of this process is not read: a launcher's job has one of its own. What has started a run on several
    machines is not known here, so of such a run this returns a description.
    """
    if "collector.launcher=join" in run.overrides.task:
        return "the command that started it on each machine, on the first one with resume="
    folders = [word for folder in _folders_named(run) for word in ("--config-dir", relative_path(folder))]
    return shlex.join(["python", relative_path(script), *folders]) + " resume="


def _folders_named(run: HydraConf | DictConfig) -> list[str]:
    """Return the config folders that the command line of a run has named; there is at most one."""
    return [source.path for source in run.runtime.config_sources if source.provider == "command-line"]


def with_earlier_overrides(argv: Sequence[str]) -> list[str]:
    """Return the command line `argv` with the overrides of the run that it resumes (``resume=<folder>``) inserted.

    They stand before those in `argv`, which take precedence. The groups that the earlier run chose are chosen again.
    The earlier settings of a group are left out, with a warning, if its option is another one now.

    Raises:
        ConfigError: the folder is not that of a run; or that run had a config folder, and `argv` has none; or a group
            is null (Hydra's own message does not name it).
    """
    groups = {field.name for field in fields(TrainConfig) if field.type == "Any"} | {"experiment"}
    for argument in argv:
        if argument in {f"{group}=null" for group in groups}:
            raise ConfigError(f"{argument}: say one of the options that --help lists; none, where there is one, is off")
    given = [argument for argument in argv if is_override(argument)]
    values = {override_name(one): one.partition("=")[2] for one in given}
    folder = values.get("resume", "").strip("'\"")
    if folder in ("", "null"):
        return list(argv)
    if "," in folder and not Path(folder).exists():
        raise ConfigError(f"resume={folder}: it is the folder of one run and is not swept over; resume runs one by one")
    stored = _stored(folder)
    earlier = [str(one) for one in stored.overrides]
    if stored.config_folders and not config_folders(argv):
        advice = f"add it: --config-dir {stored.config_folders[0]}"
        raise ConfigError(f"resume={folder}: that run was made with a config folder; {advice}")
    replaced = {override_name(one) for one in given if one[0] != "~"}
    for group in groups & replaced:
        replaced |= _global_settings_of(group, values[group], (*config_folders(argv), CONF))
    twice = {override_name(one) for one in given if one[0] == "~"}  # Hydra refuses to delete a setting twice
    kept = [one for one in earlier if override_name(one) not in (replaced | twice if one[0] == "~" else replaced)]
    chosen = [one for one in (*kept, *given) if override_name(one) in groups]
    changed = _changed_groups(folder, chosen, config_folders(argv))
    dropped = [one for one in kept if one not in chosen and override_name(one).partition(".")[0] in changed]
    if dropped:
        what = "not kept, because another option of the group is chosen now (to keep one, give it again):"
        _log.warning("resume=%s: %s %s", folder, what, shlex.join(dropped))
    kept = [one for one in kept if one not in dropped]
    first = next(i for i, argument in enumerate(argv) if is_override(argument))
    return [*argv[:first], *kept, *argv[first:]]


def _changed_groups(folder: str, chosen: Sequence[str], folders: Sequence[Path]) -> set[str]:
    """Return the groups of which another option is chosen than in the run in `folder`.

    Args:
        folder: the folder of that run.
        chosen: the overrides that choose options, on which the options of further groups depend; of a group that is
            swept over, the option is taken to be another one.
        folders: config folders of the user.
    """
    swept = {one for one in chosen if "," in one or "(" in one}
    now = compose_with(folders, [one for one in chosen if one not in swept], return_hydra_config=True)
    stored, before = _settings_of(folder)
    changed = {name for name, option in now.hydra.runtime.choices.items() if before.get(name) != option}
    defaults = all(str(one["collector"]).startswith("for/") for one in (before, now.hydra.runtime.choices))
    if defaults and stored["collector"]["_target_"] == now.collector._target_:  # of two schemes
        changed -= {"collector"}
    return changed | {override_name(one) for one in swept}


def with_earlier_settings(
    cfg: DictConfig, overrides: Sequence[str], choices: Mapping[str, str | None], folders: Sequence[Path] = ()
) -> DictConfig:
    """Return `cfg` with the values of the run that it resumes, except for `overrides` and groups with another option.

    Args:
        cfg: composed from the current defaults.
        overrides: those that `cfg` was composed with, including `with_earlier_overrides`.
        choices: the chosen option of each group.
        folders: config folders of the user.
    """
    if cfg.resume is None:
        return cfg
    stored, before = _settings_of(cfg.resume)
    changed = {group for group, choice in choices.items() if before.get(group) != choice}
    last = {name: one for one in overrides if (name := override_name(one)) not in choices}
    deleted = {name for name, override in last.items() if override[0] == "~"}
    for name in deleted:
        _delete(stored, name)
    kept = OmegaConf.merge(cfg, {name: value for name, value in stored.items() if name not in changed})
    assert isinstance(kept, DictConfig)
    named = last.keys() - deleted
    for group in changed:
        named |= _global_settings_of(group, choices[group], (*folders, CONF))
    for name in named:
        OmegaConf.update(kept, name, OmegaConf.select(cfg, name), force_add=True)
    return kept


class SettingsFiles(Reporter):
    """Writes ``config.yaml``, and the file that a run which resumes this one reads.

    Hydra's own files have the config before `with_earlier_settings`. They are written before a checkpoint is read: a
    run that is resumed into its folder, and refused, replaces them.

    Args:
        cfg: the config of the run, with its interpolations.
        run: Hydra's settings of the run.
    """

    def __init__(self, cfg: DictConfig, run: HydraConf | DictConfig) -> None:
        self._settings = {
            "overrides": list(run.overrides.task),
            "config_folders": _folders_named(run),
            "choices": dict(run.runtime.choices),
            "config": cfg,
        }

    def begin(self, folder: Path, config: dict[str, Any]) -> None:
        """Write both files."""
        path = folder / ".hydra" / f"{_SETTINGS}.yaml"
        path.parent.mkdir(exist_ok=True)
        for file, content in ((folder / "config.yaml", config), (path, self._settings)):
            with writing(file):
                replace_file(file, OmegaConf.to_yaml(OmegaConf.create(content)).encode())


def _settings_of(folder: str) -> tuple[dict[Any, Any], Mapping[str, str | None]]:
    """Return the config of the run in `folder`, with its interpolations, and the chosen option of each group."""
    stored = _stored(folder)
    content = OmegaConf.to_container(stored.config, resolve=False)
    assert isinstance(content, dict)
    return content, stored.choices


def _delete(tree: dict[Any, Any], name: str) -> None:
    """Delete the setting `name`, with dots, from nested dictionaries, if it is there."""
    *parents, key = name.split(".")
    for parent in parents:
        tree = tree.get(parent) or {}
    tree.pop(key, None)


def _global_settings_of(group: str, option: str | None, folders: Sequence[Path]) -> set[str]:
    """Return the settings outside its own group that an option sets (``collector=single`` sets num_workers)."""
    path = next((one for folder in folders if (one := folder / group / f"{option}.yaml").is_file()), None)
    if path is None or not re.match(r"\s*#\s*@package +_global_\s", path.read_text(encoding="utf-8")):
        return set()
    content = OmegaConf.load(path)
    assert isinstance(content, DictConfig)
    names: set[str] = set()
    for base in content.get("defaults", ()):
        if isinstance(base, str) and base.startswith("/"):  # an option that this one begins with
            names |= _global_settings_of("", base.partition("@")[0][1:], folders)
    for name, value in content.items():
        if name not in ("defaults", "hydra"):
            names |= {f"{name}.{key}" for key in value} if isinstance(value, DictConfig) else {str(name)}
    return names


def _stored(folder: str) -> DictConfig:
    """Return what `SettingsFiles` has written of the run in `folder`."""
    path = Path(folder) / ".hydra" / f"{_SETTINGS}.yaml"
    if not path.is_file():
        raise ConfigError(f"resume={folder}: no run is stored there, {path} is missing")
    stored = read_yaml(path)
    if not {"overrides", "config_folders", "choices", "config"} <= stored.keys():
        raise ConfigError(f"resume={folder}: that run is of another version of this program, {path} lacks settings")
    return stored
