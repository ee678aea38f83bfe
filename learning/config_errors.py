"""One-line messages for errors in a command line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from wsync import registered_backends

CONF = Path(__file__).resolve().parents[1] / "conf"
"""The folder of the project's configs."""

NOT_FOR_WORKERS = {
    "CudaWeightSyncScheme": "sends to models on the trainer's GPU, in a program of yours",
    "HTTPWeightSyncScheme": "sends to inference engines, in a program of yours (docs/engines.md)",
    "RayModuleTransformScheme": "sends to modules in environments, by a collector (docs/tutorials/collectors.md)",
}
"""What schemes are for that no collector carries."""

PLUGINS = {
    "hydra/launcher=joblib": "sweep",
    "hydra/launcher=submitit_local": "slurm",
    "hydra/launcher=submitit_slurm": "slurm",
    "hydra/sweeper=optuna": "sweep",
}
"""Options that an extra of this package installs."""

Parameters = Mapping[str, tuple[str, Sequence[str]]]
"""For a group with a class or function of the user's: its name, and the names of its parameters.

Where it accepts any name, it is called "", and the names are those in the YAML file.
"""

Settings = Mapping[str, Sequence[str]]
"""The names of all settings; for one that belongs to a config group, the options of the group that have it."""


def one_line(
    error: BaseException,
    settings: Settings,
    chosen: Mapping[str, str] | None = None,
    own: Parameters | None = None,
) -> str:
    """Return what an error of Hydra or OmegaConf is about; after a misspelt name, a suggestion from `settings`.

    Args:
        error: the error.
        settings: all that there are.
        chosen: the option of each group that the command line names, where it is known.
        own: the groups whose settings are parameters of the user's own classes and functions.
    """
    text, cause = str(error), str(error.__cause__ or "")
    reason = cause.partition("\n")[0]
    if found := re.match(r"Could not override '(.+?)'", text):
        name = found[1]
        if "not in struct" in cause:  # a dictionary without a schema
            group, _, key = name.partition(".")
            owner, parameters = (own or {}).get(group, ("", ()))
            if owner and key.partition(".")[0] not in parameters:
                return unknown_parameter(name, owner, parameters)
            hint = "" if key in parameters else _suggestion(key, parameters)
            return f"{name} is not there yet{hint}; say +{name}=… to add it"
        return unknown(name, settings, chosen)
    if found := re.match(r"Error merging override (.+)", text):
        whole = re.search(r"Value '([0-9]+)\.0' of type 'float' could not be converted to Integer", reason)
        listed = "is not a ListConfig" in reason
        example = f"{int(whole[1]):_}" if whole else f"[{found[1].partition('=')[2]}]" if listed else ""
        return f"{found[1]}: {reason}" + (f"; write {example}" if example else "")
    if found := re.match(r"In '(.+)/(.+?)': .*\nKey '(.+?)' not in", text):
        group, option, name = found.groups()
        return f"{group}/{option}.yaml: {unknown(f'{group}.{name}', settings, {group: option})}"
    if found := re.match(r"In '(.+)': (?s:.*)Merge error: str is not a subclass of \w+\. value: (.+)", text):
        file, option = found.groups()
        return f"{file}.yaml: the option {option!r} of a group is chosen under defaults: - override /<group>: {option}"
    if found := re.search(r"Could not find '(.+)/(.+?)'", text):
        group, name = found.groups()
        if group == "collector/for":  # a backend of a folder that is not --config-dir
            return f"the collector for weight_sync={name} is not known: add collector=…"
        if (plugin := f"{group}={name}") in PLUGINS:
            return f"{plugin} needs the extra [{PLUGINS[plugin]}]: pip install -e '.[{PLUGINS[plugin]}]'"
        options = [line.strip() for line in text.partition("Available options in")[2].splitlines() if line[:1] == "\t"]
        options = [option for option in options if not option.startswith(("base_", "provider="))]
        if group == "weight_sync":
            options = [option for option in options if _class_of(option) not in NOT_FOR_WORKERS]
        options += sorted(f"{path.parent.name}/{path.stem}" for path in (CONF / group).glob("*/*.yaml"))
        yours = "; one of your own: --config-dir"
        yours += " or an entry point, see docs/backends.md" if group == "weight_sync" else ""
        known = f"there are: {', '.join(options)}{yours}"
        return f"{group}={name}: there is no such option{_suggestion(name, options)}; {known}"
    if found := re.search(r"type `(.+)Config` has missing mandatory value: (\w+)", text):
        scheme, name = found.groups()
        if scheme == "Env":
            return f"env={(chosen or {}).get('env', 'gym')} needs an id of Gymnasium: env.{name}=MountainCar-v0"
        example = " (a folder, or s3://bucket/run)" if name == "url" else ""
        return f"{scheme} needs a value for {name!r}: weight_sync.{name}=…{example}"
    if found := re.match(r"While dereferencing interpolation '(.+)': (.+)\n\s+full_key: (\S+)", text):
        return f"{found[3]}={found[1]}: {found[2]}"
    lines = [line.strip() for line in f"{text}\n{reason}".splitlines()]
    message = "; ".join(line for line in lines if line and not line.startswith(("See http", "full_key", "object_type")))
    return f"this override cannot be read: {message}" if "override_grammar" in text else message


def unknown(name: str, settings: Settings, chosen: Mapping[str, str] | None = None) -> str:
    """Return that no setting is called `name`, with the closest name of `settings` or the options that have it.

    Args:
        name: the name of the setting.
        settings: all that there are; those of options that are not `chosen` are not suggested.
        chosen: the option of each group, where it is known.
    """
    group = name.partition(".")[0]
    if options := settings.get(name):
        return f"'{name}' is no setting of the {group} that was chosen, only of {group}={', '.join(sorted(options))}"
    option = (chosen or {}).get(group)
    siblings = [one for one in settings if one.startswith(f"{group}.") and not one.rpartition(".")[2].startswith("_")]
    siblings = [one for one in siblings if option in settings[one]] or siblings
    others = [one for one in settings if not one.startswith(f"{group}.")]
    owner = f"{group}={option}" if option else group
    known = f"; {owner} has: {', '.join(sorted(one.partition('.')[2] for one in siblings))}" if siblings else ""
    return f"no setting is called '{name}'{_suggestion(name, [*siblings, *others])}{known}"


def unknown_parameter(setting: str, owner: str, parameters: Iterable[str]) -> str:
    """Return that a class or function has no parameter for a setting of its group, with the closest one that it has.

    Args:
        setting: with the group, ``"policy.widht"``.
        owner: name of the class or function.
        parameters: the parameters that it has, and settings that every option of the group has.
    """
    name, known = setting.partition(".")[2], sorted(parameters)
    return f"{setting}: {owner} has no parameter '{name}'{_suggestion(name, known)}; there are: {', '.join(known)}"


def _class_of(backend: str) -> str:
    """Return the name of the class of a registered backend; empty if there is none of that name."""
    return registered_backends().get(backend, "").rpartition(":")[2]


def _suggestion(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean …?" for the same name in another group, or else one that is spelt similarly."""
    names = [one for one in known if not one.rpartition(".")[2].startswith("_")]  # those are Hydra's own
    elsewhere = [one for one in names if re.split("[./]", one)[-1] == re.split("[./]", name)[-1]]
    group, _, key = name.rpartition(".")
    own = {one.removeprefix(f"{group}."): one for one in names if one.rpartition(".")[0] == group}
    close = get_close_matches(name, elsewhere, n=1, cutoff=0.0) or [
        own[one] for one in get_close_matches(key, own, n=1)
    ]
    others = [one for one in names if one not in own.values() and not name.startswith(f"{one}.")]
    close = close or get_close_matches(name, others, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
