"""One-line messages for errors in a command line."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches

_NOISE = ("full_key", "object_type", "reference_type", "See http", "To append")


def one_line(error: BaseException, settings: Collection[str], nested: Iterable[str] = ()) -> str:
    """Return what an error of Hydra or OmegaConf says, in one line; after a misspelt name, with a suggestion.

    Args:
        error: the error.
        settings: the names of all settings.
        nested: options in folders of their group, ``"env/atari/pong"``, which Hydra does not list.
    """
    text = f"{error}\n{error.__cause__ or ''}"
    if found := re.search(r"Could not find '(.+?)'", text):
        return _no_such_option(found[1], text, nested)
    lines = [line.strip().rstrip(".") for line in text.splitlines()]
    message = ": ".join(dict.fromkeys(line for line in lines if line and not line.startswith(_NOISE)))
    if key := re.search(r"full_key: (\S+)", text):
        message = message if key[1] in message else f"{key[1]}: {message}"
    if found := re.match(r"Could not override '(.+?)'", text):
        name = found[1]
        if "is not in struct" in text:  # a dictionary without a schema
            return f"{message}; say +{name}=… to add it"
        if name in settings:
            return f"'{name}' is a setting of another option of {name.partition('.')[0]} than the chosen one"
        return f"no setting is called '{name}'{did_you_mean(name, settings)}"
    if "override_grammar" in text:
        return f"this override cannot be read: {message}"
    return message


def _no_such_option(path: str, text: str, nested: Iterable[str]) -> str:
    group, _, name = path.rpartition("/")
    options = [line.strip() for line in text.splitlines() if line.startswith("\t") and "provider=" not in line]
    options = [one for one in options if not one.startswith("base_")]
    options += [one.removeprefix(f"{group}/") for one in nested if one.startswith(f"{group}/")]
    return f"{group}={name}: there is no such option{did_you_mean(name, options)}; there are: {', '.join(options)}"


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return "; did you mean …?" with the same name in another group, or else one that is spelt similarly."""
    last = re.split("[./]", name)[-1]
    elsewhere = [one for one in known if re.split("[./]", one)[-1] == last]
    close = get_close_matches(name, elsewhere, n=1, cutoff=0.0) or get_close_matches(name, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
