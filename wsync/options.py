"""The options that every scheme has: they are described, and have their defaults, in ``WeightSyncScheme``."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Sequence
from difflib import get_close_matches
from typing import Literal, TypedDict, Unpack

from wsync.transforms.chain import Transform

__all__ = ["SchemeOptions"]


class SchemeOptions(TypedDict, total=False):
    """What the ``__init__`` of a backend's scheme hands on: ``**options: Unpack[SchemeOptions]``."""

    send_transform: Transform | Sequence[Transform] | None
    receive_transform: Transform | Sequence[Transform] | None
    initiator: Literal["sender", "receiver"]
    max_staleness: int | None


def full_signature(scheme: type) -> inspect.Signature:
    """Return the signature of ``scheme``, in which ``**options`` is replaced by what it stands for.

    ``**options: Unpack[SchemeOptions]`` stands for those; with any other annotation, for all arguments of the class
    that ``scheme`` derives from. The signature is what ``help`` shows, and what configs are made from.
    """
    found: list[inspect.Parameter] = []
    passed_on: Container[str] | None = None  # None: all
    for one in scheme.__mro__:
        if "__init__" not in vars(one):
            continue
        own, known = list(inspect.signature(one.__init__).parameters.values())[1:], [one.name for one in found]
        options = [parameter for parameter in own if parameter.kind is parameter.VAR_KEYWORD]
        for parameter in own:
            if parameter.name in known or parameter in options or (passed_on and parameter.name not in passed_on):
                continue
            found.append(parameter.replace(kind=parameter.KEYWORD_ONLY) if known else parameter)
        if not options:
            break
        if options[0].annotation in ("Unpack[SchemeOptions]", Unpack[SchemeOptions]):
            passed_on = SchemeOptions.__annotations__
    return inspect.Signature(found)


def check_option_names(scheme: type, options: Iterable[str]) -> None:
    """Check that ``scheme`` has arguments of these names.

    Raises:
        TypeError: it has no such argument; names the class, and a similar argument, or all of them.
    """
    known = inspect.signature(scheme).parameters
    unknown = [name for name in options if name not in known]
    if unknown and not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values()):
        similar = get_close_matches(unknown[0], known, 1)
        hint = f"did you mean '{similar[0]}'?" if similar else f"there are {', '.join(known)}"
        raise TypeError(f"{scheme.__name__} has no argument '{unknown[0]}': {hint}")


def check_pull_options(initiator: str, max_staleness: int | None) -> None:
    """Check ``initiator`` and ``max_staleness``; ValueError if one is wrong, or they do not go together."""
    if initiator not in ("sender", "receiver"):
        raise ValueError(f"initiator is 'sender' or 'receiver', not {initiator!r}")
    if max_staleness is not None and (initiator == "sender" or max_staleness < 0):
        raise ValueError("max_staleness is a number of versions, 0 or more, and needs initiator='receiver'")
