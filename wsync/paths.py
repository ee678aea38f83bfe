"""Finding a model by its id in a context: ``"policy"``, ``"env.value_net"``, ``"transform[0].module"``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn

_STEP = re.compile(r"\.?([A-Za-z_]\w*)|\[(-?\d+)\]|\[['\"]([^'\"]+)['\"]\]")


@runtime_checkable
class RemoteWorker(Protocol):
    """A worker of a collector: its index from 0, and a descriptor that is readable when its process has ended."""

    @property
    def worker_idx(self) -> int: ...

    @property
    def sentinel(self) -> int: ...


@runtime_checkable
class CollectorContext(Protocol):
    """A collector that a scheme is initialised with on the sender: it has its workers, in order."""

    @property
    def remote_workers(self) -> Sequence[RemoteWorker]: ...


class NoSuchPath(LookupError):
    """A path leads nowhere. ``reached`` is the part that exists; ``lacking`` says what there is instead."""

    def __init__(self, message: str, reached: str, lacking: str) -> None:
        super().__init__(message)
        self.reached, self.lacking = reached, lacking


def find_model(context: object, model_id: str) -> nn.Module:
    """Return the model that ``model_id`` names in ``context``: by its ``get_model(model_id)``, else as a path.

    LookupError: there is none; says what there is. TypeError: it is no module. ValueError: the id is no path.
    """
    own: Any = getattr(context, "get_model", None)
    found = find_object(context, model_id) if own is None else own(model_id)
    if not isinstance(found, nn.Module):
        raise TypeError(f"'{model_id}' in {type(context).__name__} is a {type(found).__name__}, not a torch.nn.Module")
    return found


def find_object(context: object, path: str) -> Any:
    """Return what is at ``path`` in ``context``. NoSuchPath: there is none; ValueError: no path."""
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
            reached = path[:end]
            lacking = f"{reached or 'the context'} has no {step.group().lstrip('.')}; it has {_listed(found)}"
            raise NoSuchPath(f"no '{path}' in {type(context).__name__}: {lacking}", reached, lacking) from error
        end = step.end()
    return found


def _listed(found: object) -> str:
    """The steps that can be taken from ``found``: indices, keys, or public attributes of its own."""
    if isinstance(found, Mapping):
        names = [f"[{key!r}]" for key in found]
    elif isinstance(found, Sequence):
        names = [f"[{index}]" for index in range(len(found))]
    elif isinstance(found, nn.Module):
        children = (*found._modules, *found._parameters, *found._buffers)
        names = [f"[{name}]" if name.isdigit() else name for name in children]
    else:
        names = sorted(name for name in getattr(found, "__dict__", ()) if not name.startswith("_"))
    return ", ".join(names) or "nothing"


def find_or_none(context: object, model_id: str) -> nn.Module | None:
    """The context's model; None where only the workers have it, and every send brings its weights."""
    try:
        return find_model(context, model_id)
    except LookupError:
        return None
