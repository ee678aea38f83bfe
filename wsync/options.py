"""The options that every scheme has: they are described, and have their defaults, in ``WeightSyncScheme``."""

from __future__ import annotations

import inspect
from collections.abc import Container, Sequence
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
