"""Backends by name, as wsync registers them, and the collectors that support them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import partial
from importlib import import_module
from typing import Any

import typer

import wsync
from collectors.config import BUNDLED
from wsync import registered_backends

_OTHERS = ("none", "ray_module_transform", "store", "http", "cuda")
BACKENDS = tuple(name for name in registered_backends() if name not in _OTHERS)
"""Backends that send a policy's weights to workers that connect."""


def scheme_class(backend: str) -> type[wsync.WeightSyncScheme]:
    """Import the scheme class of ``backend``."""
    module, name = registered_backends()[backend].split(":")
    return getattr(import_module(module), name)


def takes(backend: str, option: str) -> bool:
    """Whether the scheme of ``backend`` has the constructor argument ``option``."""
    return option in inspect.signature(scheme_class(backend)).parameters


def needs_cluster(backend: str) -> bool:
    """Whether workers cannot be plain processes: they are members of an RPC group, or Ray actors."""
    return backend in ("rpc", "ray")


def variants() -> dict[str, Callable[[], wsync.WeightSyncScheme]]:
    """Return a factory for each backend, and for each variant that is a different implementation, by label."""
    found: dict[str, Callable[[], wsync.WeightSyncScheme]] = {}
    for backend in BACKENDS:
        make: Callable[..., wsync.WeightSyncScheme] = partial(wsync.WeightSyncScheme.from_backend, backend)
        found[backend] = make
        if takes(backend, "acknowledge"):
            found[f"{backend}-published"] = partial(make, acknowledge="published")
        if takes(backend, "shared_memory") and not needs_cluster(backend):
            found[f"{backend}-gloo"] = partial(make, shared_memory=False, inline_bytes=0)
            found[f"{backend}-inline"] = partial(make, shared_memory=False)
    return found


def collector_class(backend: str, sync: bool = True) -> Callable[..., Any]:
    """Return the collector with workers that supports ``backend``, with ``sync`` set."""
    module, _, name = BUNDLED[scheme_class(backend).collectors[0]]._target_.rpartition(".")
    name = name.replace("MultiSync", "Multi")  # which takes ``sync``
    return partial(getattr(import_module(module), name), sync=sync)


def check(chosen: Collection[str], known: Collection[str]) -> None:
    """Check names that a user has given.

    Raises:
        typer.BadParameter: a name is not ``known``.
    """
    if unknown := [name for name in chosen if name not in known]:
        raise typer.BadParameter(f"unknown backend {', '.join(unknown)}: choose from {', '.join(known)}")
