"""Backends by name, as wsync registers them, and the collectors that support them."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import typer

import wsync

COLLECTORS = {
    "shared_mem": "collectors:MultiCollector",
    "multiprocess": "collectors:MultiCollector",
    "distributed": "collectors.distributed:DistributedCollector",
    "rpc": "collectors.distributed:RPCCollector",
    "ray": "collectors.distributed:RayCollector",
}
"""By backend: the collector with workers that it can update."""
BACKENDS = tuple(COLLECTORS)


def imported(place: str) -> Any:
    """Import ``"module:name"``."""
    module, name = place.split(":")
    return getattr(import_module(module), name)


def takes(backend: str, option: str) -> bool:
    """Whether the scheme of ``backend`` has the constructor argument ``option``."""
    return option in inspect.signature(imported(wsync.registered_backends()[backend])).parameters


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
    return partial(imported(COLLECTORS[backend]), sync=sync)


def check(chosen: Collection[str], known: Collection[str]) -> None:
    """Check names that a user has given; BadParameter: one is not ``known``."""
    if unknown := [name for name in chosen if name not in known]:
        raise typer.BadParameter(f"unknown backend {', '.join(unknown)}: choose from {', '.join(known)}")


@contextmanager
def ray_cluster() -> Iterator[None]:
    """Start a Ray cluster of this process alone, on the loopback interface."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init("local", include_dashboard=False, logging_level=logging.ERROR, _node_ip_address="127.0.0.1")
    try:
        yield
    finally:
        ray.shutdown()
