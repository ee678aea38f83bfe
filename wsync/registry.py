"""The names of backends: the built-in ones, those of ``register_backend``, and entry points ``wsync.backends``."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

_BACKENDS = {
    "shared_mem": "wsync.backends.shared_mem:SharedMemWeightSyncScheme",
    "multiprocess": "wsync.backends.multiprocess:MultiProcessWeightSyncScheme",
    "cuda": "wsync.backends.cuda:CudaWeightSyncScheme",
    "distributed": "wsync.backends.distributed:DistributedWeightSyncScheme",
    "rpc": "wsync.backends.rpc:RPCWeightSyncScheme",
    "ray": "wsync.backends.ray:RayWeightSyncScheme",
    "ray_module_transform": "wsync.backends.ray:RayModuleTransformScheme",
    "store": "wsync.backends.store:StoreWeightSyncScheme",
    "http": "wsync.backends.http:HTTPWeightSyncScheme",
    "none": "wsync.backends.none:NoWeightSyncScheme",
}


def register_backend(name: str, scheme: str) -> None:
    """Add a backend. Registering the same one again is harmless.

    Args:
        name: for ``WeightSyncScheme.from_backend``. ``weight_sync=<name>`` of ``train.py``, which starts earlier, needs
            an entry point ``wsync.backends`` or a YAML file instead.
        scheme: import string of the scheme's class, ``"mypackage.module:MyScheme"``.

    Raises:
        ValueError: the name belongs to another backend, or ``scheme`` is no import string.
    """
    if not isinstance(scheme, str) or not all(scheme.partition(":")):
        raise ValueError(f"the scheme of backend '{name}' is an import string 'package.module:Class', not {scheme!r}")
    known = _BACKENDS.setdefault(name, scheme)
    if known != scheme:
        raise ValueError(f"backend '{name}' is registered already, as {known}")


def registered_backends() -> dict[str, str]:
    """Return all backends, ``{name: import string}``; registered ones first, then those of installed packages."""
    found = dict(_BACKENDS)
    for point in entry_points(group="wsync.backends"):
        found.setdefault(point.name, point.value)
    return found


def import_string(name: str) -> str:
    """Return the import string of a backend's scheme; ValueError: there is no such backend; lists all."""
    known = registered_backends()
    if name not in known:
        raise ValueError(f"unknown backend {name!r}: choose one of {', '.join(sorted(known))}")
    return known[name]


def load_backend(name: str) -> Any:
    """Return the scheme class of a backend; ValueError, ImportError, AttributeError, TypeError: there is none."""
    registered = import_string(name)
    module, _, attribute = registered.partition(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, type) or not any(one.__name__ == "WeightSyncScheme" for one in found.__mro__):
        raise TypeError(f"backend '{name}' is registered as '{registered}', which is no subclass of WeightSyncScheme")
    return found
