"""The signatures of collectors' classes: all arguments by name, and errors that name the class that was called."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from inspect import Parameter, Signature
from typing import Any


def set_signature(cls: type, options: Collection[str]) -> None:
    """Set the signatures of ``cls`` and of its ``__init__``, in which ``**options: Unpack[…]`` are keyword arguments.

    Args:
        cls: a class with an ``__init__``; its bases have signatures.
        options: the names that ``**options`` stands for; their defaults and types are those of the nearest base class
            that has them.
    """
    own = list(inspect.signature(cls.__init__).parameters.values())[1:]
    rest = next((one for one in own if one.kind is Parameter.VAR_KEYWORD and "Unpack[" in str(one.annotation)), None)
    if rest is None:
        _set(cls, own)
        return
    named = [one for one in own if one is not rest]
    inherited = {name: one for base in reversed(cls.__mro__[1:]) for name, one in _parameters(base).items()}
    known = {one.name for one in named}
    added = [inherited[name] for name in options if name in inherited and name not in known]
    _set(cls, [*named, *added])


def _set(cls: Any, parameters: Sequence[Parameter]) -> None:
    cls.__signature__ = Signature(parameters)
    if "__init__" in vars(cls):
        cls.__init__.__signature__ = Signature([Parameter("self", Parameter.POSITIONAL_OR_KEYWORD), *parameters])


def _parameters(cls: type) -> dict[str, Parameter]:
    signature = vars(cls).get("__signature__")
    return dict(signature.parameters) if isinstance(signature, Signature) else {}


def check_arguments(cls: type, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Check the arguments of ``cls(*arguments, **options)`` against its signature.

    Raises:
        TypeError: one is missing, unknown or given twice; names ``cls``, and a similar argument.
    """
    signature = inspect.signature(cls)
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        names = signature.parameters
        unknown = [name for name in options if name not in names]
        if not unknown or any(one.kind is Parameter.VAR_KEYWORD for one in names.values()):
            raise TypeError(f"{cls.__name__}: {error}") from None
        similar = get_close_matches(unknown[0], names, 1)
        hint = f"did you mean '{similar[0]}'?" if similar else f"there are {', '.join(names)}"
        raise TypeError(f"{cls.__name__} has no argument '{unknown[0]}': {hint}") from None
