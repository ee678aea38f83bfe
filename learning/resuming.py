"""A run that continues another one (``resume=<folder>``): its command line.

The settings of a resumed run are the overrides of the earlier one, followed by those of its own command line.
"""

from __future__ import annotations

import logging
import shlex
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from collectors.errors import ConfigError
from learning.reporting.files import file_errors, relative_path

SETTINGS = Path(".hydra") / "resume.yaml"  # in the folder of a run: its overrides, and its config folder
# By group: the groups that take their option from it, unless the command line names one.
_DEPENDENT = {"weight_sync": ("collector",), "env": ("algorithm", "policy")}
_log = logging.getLogger(__name__)


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
    return read_yaml(folder / SETTINGS)["config_folders"] if (folder / SETTINGS).is_file() else []


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the content of one of a run's YAML files; raises FolderError if it is missing or damaged."""
    with file_errors(path, "read"):
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from error
        if not isinstance(content, dict):
            raise ValueError("it has no settings")
        return content


def resume_command(script: str, overrides: Sequence[str], folders: Sequence[str]) -> str:
    """Return the command that continues a run of `script`, without the folder of the run at its end."""
    if "collector.launcher=join" in overrides:
        return "the command that started it on each machine, on the first one with resume="
    words = [word for folder in folders for word in ("--config-dir", relative_path(folder))]
    return shlex.join(["python", relative_path(script), *words]) + " resume="


def with_earlier_overrides(argv: Sequence[str]) -> list[str]:
    """Return the command line `argv` with the overrides of the run that it resumes (``resume=<folder>``) inserted.

    They stand before those in `argv`, which take precedence. The settings of a group are left out, with a warning, if
    `argv` chooses an option of it, or of a group that decides about it. Raises ConfigError or FolderError if the folder
    has no usable settings, or the run had a config folder and `argv` has none.
    """
    given = {override_name(one): one for one in argv if is_override(one)}
    folder = given.get("resume", "").partition("=")[2].strip("'\"")
    if folder in ("", "null"):
        return list(argv)
    if "," in folder and not Path(folder).exists():
        raise ConfigError(f"resume={folder}: it is the folder of one run and is not swept over; resume runs one by one")
    if not (Path(folder) / SETTINGS).is_file():
        raise ConfigError(f"resume={folder}: no run is stored there, {Path(folder) / SETTINGS} is missing")
    stored = read_yaml(Path(folder) / SETTINGS)
    if stored["config_folders"] and not config_folders(argv):
        advice = f"add it: --config-dir {stored['config_folders'][0]}"
        raise ConfigError(f"resume={folder}: that run was made with a config folder; {advice}")
    earlier = {override_name(one): one for one in stored["overrides"]}
    renewed = {name for name, one in given.items() if "." not in name and one != earlier.get(name)}
    named = {*given, *earlier}
    renewed |= {one for group in renewed for one in _DEPENDENT.get(group, ()) if one not in named}
    dropped = [one for name, one in earlier.items() if "." in name and name.partition(".")[0] in renewed]
    if dropped:
        what = "not kept, because another option of the group is chosen now (to keep one, give it again):"
        _log.warning("resume=%s: %s %s", folder, what, shlex.join(dropped))
    deletions = {name for name, one in given.items() if one[0] == "~"}  # what they delete has to be there
    replaced = [one for name, one in earlier.items() if name in given and (one[0] == "~" or name not in deletions)]
    kept = [one for one in stored["overrides"] if one not in (*dropped, *replaced)]
    first = next(i for i, argument in enumerate(argv) if is_override(argument))
    return [*argv[:first], *kept, *argv[first:]]
