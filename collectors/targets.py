"""Instantiating what a setting names by ``_target_``, with errors that name the setting."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from collectors.errors import ConfigError, lines_of_user


def instantiate_setting(setting: str, config: Any, *args: Any, **options: Any) -> Any:
    """Return ``hydra.utils.instantiate(config, *args, **options)``, with plain lists and dictionaries as arguments.

    Raises:
        ConfigError: there is no such class or function, or it raised an error. The message begins with `setting`; the
            notes are the lines of the user's modules that were being executed.
    """
    if not (isinstance(config, Mapping) and "_convert_" in config):
        options = {"_convert_": "all", **options}
    try:
        return instantiate(config, *args, **options)
    except InstantiationException as error:
        described = ConfigError(_described(error, setting))
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        for line in lines_of_user(first) if first is not error else ():
            described.add_note(line)
        raise described from error


def _described(error: InstantiationException, setting: str) -> str:
    text, cause = str(error), error.__cause__
    if within := re.search(r"^full_key: (\S+)", text, re.MULTILINE):
        setting += f".{within[1]}"
    if cause is not None and (found := re.match(r"Error in call to target '(?:.+\.)?(.+?)'", text)):
        message = " ".join(str(cause).split()) or repr(cause)
        return f"{setting}: {message if message.startswith(found[1]) else f'{found[1]}: {message}'}"
    if cause is not None and (found := re.match(r"Error locating target '(.+?)'", text)):
        # Hydra's "Error loading …" has the error of the import as its cause; a module's own error comes as it is.
        origin = cause.__cause__ if str(cause).startswith("Error loading ") else cause
        return f"{setting}._target_={found[1]}: {_not_loaded(found[1], origin or cause)}"
    return f"{setting}: {text.splitlines()[0]}"


def _not_loaded(target: str, error: BaseException) -> str:
    if not isinstance(error, ModuleNotFoundError) or not f"{target}.".startswith(f"{error.name}."):
        return f"{type(error).__name__}: {' '.join(str(error).split())}"  # raised by a module
    module, _, name = str(error.name).rpartition(".")
    if not module:
        return f"there is no module '{name}' on sys.path: name its folder by --config-dir, or add it to PYTHONPATH"
    close = get_close_matches(name, dir(sys.modules[module]), n=1)
    return f"module '{module}' has no '{name}'" + (f"; did you mean '{close[0]}'?" if close else "")
