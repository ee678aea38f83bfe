"""What backends there are, by name, and the options that their schemes have."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Literal, TypedDict

from wsync.transforms import Transform

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

    ``scheme`` is the import string of a class, ``"mypackage.module:MyScheme"``; ``name`` is for ``from_backend``.
    ``weight_sync=<name>`` of ``train.py`` needs an entry point ``wsync.backends`` or a YAML file instead.

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


def load_backend(name: str) -> Any:
    """Return the scheme class of a backend; ValueError, ImportError, AttributeError, TypeError: there is none."""
    known = registered_backends()
    if name not in known:
        raise ValueError(f"unknown backend {name!r}: choose one of {', '.join(sorted(known))}")
    module, _, attribute = known[name].partition(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, type) or not any(one.__name__ == "WeightSyncScheme" for one in found.__mro__):
        raise TypeError(f"backend '{name}' is registered as '{known[name]}', which is no subclass of WeightSyncScheme")
    return found


class SchemeOptions(TypedDict, total=False):
    """What a scheme's ``__init__`` hands on to ``WeightSyncScheme``: ``**options: Unpack[SchemeOptions]``."""

    timeout: float | None
    bind: bool
    gate: bool | Sequence[str]
    send_transform: Transform | Sequence[Transform] | None
    receive_transform: Transform | Sequence[Transform] | None
    initiator: Literal["sender", "receiver"]
    max_staleness: int | None


def full_signature(scheme: type) -> inspect.Signature:
    """Return the signature of ``scheme``, which ``help`` shows, and from which configs are made.

    ``**options: Unpack[SchemeOptions]`` stands for those, any other ``**options`` for all arguments of the next class.
    """
    classes = [one for one in scheme.__mro__ if "__init__" in vars(one)]
    own = list(inspect.signature(classes[0].__init__).parameters.values())[1:]
    if not own or own[-1].kind is not inspect.Parameter.VAR_KEYWORD:
        return inspect.Signature(own)
    options, known = own.pop(), {parameter.name for parameter in own}
    for name, parameter in full_signature(classes[1]).parameters.items():
        handed_on = "SchemeOptions" not in str(options.annotation) or name in SchemeOptions.__annotations__
        if handed_on and name not in known:
            own.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    return inspect.Signature(own)
