"""Finding a model by its id in a context: ``"policy"``, ``"env.value_net"``, ``"transform[0].module"``."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from wsync.types import ModelContext

_STEP = re.compile(r"\.?([A-Za-z_]\w*)|\[(-?\d+)\]|\[['\"]([^'\"]+)['\"]\]")


def find_model(context: object, model_id: str) -> nn.Module:
    """The model that ``model_id`` names in ``context``.

    The context's own ``get_model(model_id)`` is asked first, if it has one; else the id is a path of attributes and
    indices.

    Raises:
        LookupError: there is no such thing; the message says how far the path leads.
        TypeError: it is not a module.
        ValueError: the id is not a path.
    """
    found: Any = context.get_model(model_id) if isinstance(context, ModelContext) else _follow(context, model_id)
    if not isinstance(found, nn.Module):
        raise TypeError(f"'{model_id}' in {type(context).__name__} is a {type(found).__name__}, not a torch.nn.Module")
    return found


def _follow(context: object, path: str) -> Any:
    found, end = context, 0
    while end < len(path):
        step = _STEP.match(path, end)
        if step is None:
            raise ValueError(f'\'{path}\' is not a path like "env.value_net" or "transform[0].module"')
        name, index, key = step.groups()
        try:
            item = int(index) if index is not None else key
            found = getattr(found, name) if name is not None else found[item]  # pyright: ignore[reportIndexIssue]
        except (AttributeError, LookupError, TypeError) as error:
            reached = path[:end] or "the context"
            lacking = f"{reached} has no {step.group().lstrip('.')}"
            raise LookupError(f"no '{path}' in {type(context).__name__}: {lacking}") from error
        end = step.end()
    return found


def find_or_none(context: object, model_id: str) -> nn.Module | None:
    """The context's model; None where only the workers have it, and every send brings its weights."""
    try:
        return find_model(context, model_id)
    except LookupError:
        return None
