"""Hydra configs of the backends: structured configs, made from the signatures of their schemes."""

from __future__ import annotations

import inspect
import os
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import field, make_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from wsync.errors import missing_extra
from wsync.registry import registered_backends
from wsync.scheme import WeightSyncScheme

try:
    from hydra.core.config_store import ConfigStore
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError
except ModuleNotFoundError as error:
    raise missing_extra(error, "train") from error

_PLAIN = (bool, int, float, str, type(None))
_OF_PROGRAMS = {"policy_weights", "auto_register", "per_worker_weights"}  # arguments, not settings


def register_configs(defaults: Mapping[str, Any] | None = None, folders: Sequence[Path] = ()) -> None:
    """Add every backend to Hydra's ConfigStore: those that are registered, and YAML files of the group ``weight_sync``.

    ``weight_sync/base_<name>`` is a registered backend, and so is ``weight_sync/<name>`` where no file has that name;
    ``weight_sync/schema/<name>`` is the scheme of a file, which is that of the backend in its defaults list, or of its
    own name, if it has no ``_target_``; ``collector/for/<name>`` is the collector that a scheme names first.

    ``defaults`` replace those of schemes with such an option, ``{"timeout": "${timeout}"}``; ``folders`` are Hydra's,
    in its order. ValueError: the store has another config of one of these names.
    """
    overriding = tuple((defaults or {}).items())
    targets = {name: scheme.replace(":", ".") for name, scheme in registered_backends().items()}
    paths = [path for folder in reversed(folders) for path in sorted((folder / "weight_sync").glob("*.yaml"))]
    files = {path.stem: _target_of(path, targets) for path in paths}
    for name, target in targets.items():
        store_once("weight_sync", f"base_{name}", config_of(target, overriding))
        if name not in files:
            store_once("weight_sync", name, config_of(target, overriding))
    for name, target in files.items():
        if target is not None:
            store_once("weight_sync/schema", name, config_of(target, overriding))
    for name, target in {**targets, **files}.items():
        scheme = _imported(target)
        known = isinstance(scheme, type) and issubclass(scheme, WeightSyncScheme)
        collector = next(iter(scheme.collectors if known else ()), WeightSyncScheme.collectors[0])
        store_once("collector/for", name, {"defaults": [f"/collector/{collector}@_here_"]})


def _target_of(path: Path, targets: Mapping[str, str]) -> str | None:
    """Return the ``_target_`` of a YAML file; None if there is none, or it cannot be read, which Hydra reports."""
    try:
        content = OmegaConf.load(path)
    except (OSError, YAMLError, OmegaConfBaseException):
        return None
    if not isinstance(content, DictConfig):
        return None
    names = [str(entry).removeprefix("base_") for entry in content.get("defaults") or ()]
    known = [targets[name] for name in (*names, path.stem) if name in targets]
    return content.get("_target_") or next(iter(known), None)


def _imported(target: str | None) -> Any:
    """Return the class or function with the dotted name ``target``; None if it cannot be imported."""
    module, _, attribute = (target or "").rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except Exception:  # noqa: BLE001  (of any module; Hydra reports it if the backend is chosen)
        return None


@cache  # two configs of one scheme have to be of one type to be merged
def config_of(target: str, defaults: tuple[tuple[str, Any], ...] = ()) -> Any:
    """Return the config of the class or function ``target``: a dataclass with ``_target_`` and one field per argument.

    A ``Literal`` of strings is a ``str``; what OmegaConf has no type for is ``Any``. If it cannot be imported, or takes
    any option, the config is a dictionary, to which options can be added. ``defaults``: as in ``register_configs``.
    """
    scheme = _imported(target)
    if not callable(scheme):
        return {"_target_": target}
    hints: dict[str, Any] = {}
    for function in [one.__init__ for one in reversed(scheme.__mro__)] if isinstance(scheme, type) else [scheme]:
        with suppress(NameError):  # names that are imported for type checkers only
            hints |= typing.get_type_hints(function)
    given, parameters = dict(defaults), inspect.signature(scheme).parameters.values()
    fields: list[tuple[str, Any, Any]] = [("_target_", str, target)]
    for one in parameters:
        default = "???" if one.default is one.empty else one.default
        plain = all(isinstance(value, _PLAIN) for value in (default if type(default) is tuple else (default,)))
        plain = plain and one.name not in _OF_PROGRAMS  # a config cannot hold other defaults
        if plain and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            fields.append((one.name, _config_type(hints.get(one.name, Any)), given.get(one.name, default)))
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return {name: default for name, _, default in fields}
    made = make_dataclass(f"{scheme.__name__}Config", [(name, kind, field(default=one)) for name, kind, one in fields])
    made.__doc__ = f"The options of ``{scheme.__name__}``."
    made.__module__ = __name__
    return made


def __getattr__(name: str) -> Any:
    """Return the config of a registered backend by its class: ``SharedMemWeightSyncSchemeConfig``."""
    for target in registered_backends().values():
        if f"{target.rpartition(':')[2]}Config" == name:
            return config_of(target.replace(":", "."))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _config_type(annotation: Any) -> Any:
    if get_origin(annotation) is Literal:
        return str if all(isinstance(value, str) for value in get_args(annotation)) else Any
    if annotation in _PLAIN:
        return annotation
    if annotation == str | os.PathLike[str]:
        return str
    if get_origin(annotation) is Sequence and (item := get_args(annotation)[0]) in _PLAIN:
        return list[item]
    if get_origin(annotation) in (Union, types.UnionType):
        inner = [_config_type(one) for one in get_args(annotation) if one is not type(None)]
        if len(inner) == 1 and inner[0] is not Any:
            return inner[0] | None
    return Any


def store_once(group: str | None, name: str, node: Any) -> None:
    """Put ``node`` into Hydra's ConfigStore, which would overwrite another one without a word.

    ValueError: there is another one of this name. The same one again is harmless.
    """
    store = ConfigStore.instance()
    present: Any = store.repo
    for part in group.split("/") if group else ():
        present = present.get(part, {})
    if f"{name}.yaml" not in present:
        store.store(group=group, name=name, node=node)
        return
    known = present[f"{name}.yaml"].node
    same = OmegaConf.get_type(known) is node if isinstance(node, type) else known == OmegaConf.create(node)
    if not same:
        raise ValueError(f"the config store has another {group or ''}/{name} already")
