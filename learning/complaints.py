"""What is wrong with a command line, in one line."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches

Settings = Mapping[str, Sequence[str]]
"""The names of all, and the options of its group that have each."""


def one_line(error: BaseException, settings: Settings) -> str:
    """Say what `error`, of Hydra or OmegaConf, is about; `settings` are those to suggest from after a typo."""
    text, cause = str(error), str(error.__cause__ or "")
    reason = cause.partition("\n")[0]
    if found := re.match(r"Could not override '(.+?)'", text):
        name = found[1]
        if "not in struct" in cause:  # a free dictionary: any name is as good as another
            return f"{name}: {reason}; say +{name}=… to add it"
        return unknown(name, settings)
    if found := re.match(r"Error merging override (.+)", text):
        return f"{found[1]}: {reason}"
    if found := re.search(r"Could not find '(.+)/(.+?)'", text):
        group, name = found.groups()
        options = [line.strip() for line in text.partition("Available options in")[2].splitlines() if line[:1] == "\t"]
        options = [option for option in options if not option.startswith(("base_", "provider="))]
        return f"{group}={name}: there is no such option{_meant(name, options)}; there are: {', '.join(options)}"
    if found := re.match(r"Error in call to target '(?:.+\.)?(.+?)'", text):
        said = _joined(cause) or repr(error.__cause__)
        return said if said.startswith(found[1]) else f"{found[1]}: {said}"
    if text.startswith("Error locating target") and cause:
        return _joined(cause)
    lines = [line.strip() for line in f"{text}\n{reason}".splitlines()]
    said = "; ".join(line for line in lines if line and not line.startswith(("See http", "full_key", "object_type")))
    return f"this override cannot be read: {said}" if "override_grammar" in text else said


def unknown(name: str, settings: Settings) -> str:
    """Say that no setting is called `name`, and which of the `settings` may have been meant, or where there is one."""
    if options := settings.get(name):
        group = name.partition(".")[0]
        return f"'{name}' is no setting of the {group} that was chosen, only of {group}={', '.join(sorted(options))}"
    return f"no setting is called '{name}'{_meant(name, settings)}"


def seen_by(function: Callable[..., object], error: BaseException) -> bool:
    """Whether a call of `function` was under way when `error` was raised."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is inspect.unwrap(function).__code__ for frame, _ in frames)


def _joined(text: str) -> str:
    return " ".join(text.split())


def _meant(name: str, known: Iterable[str]) -> str:
    """What somebody may have meant: the same word elsewhere, or one that is spelt nearly so."""
    names = [one for one in known if not one.rpartition(".")[2].startswith("_")]  # those are Hydra's
    elsewhere = [one for one in names if one.rpartition(".")[2] == name.rpartition(".")[2]]
    close = get_close_matches(name, elsewhere, n=1, cutoff=0.0) or get_close_matches(name, names, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
