"""One canonical form for a model's weights, whatever they come as: flat dotted names, tensors, extra state."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import is_
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from wsync import loops
from wsync.errors import LayoutMismatch
from wsync.loops.tensors import is_sharded

EXTRA = "_extra_state"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A model's weights by name. The tensors are the source's own: nothing is copied.

    Attributes:
        tensors: parameters and buffers, ``{"layer.weight": tensor}``.
        extra: ``{"layer._extra_state": object}``; ``None`` where the format cannot say (a TensorDict without any).
        optional: names that another format of the same weights may lack (non-persistent buffers).
        model_may_have_more: whether they are a part of a model on purpose.
    """

    tensors: Mapping[str, Tensor]
    extra: Mapping[str, Any] | None = None
    optional: frozenset[str] = field(default_factory=frozenset)
    model_may_have_more: bool = False

    def with_optional(self, names: frozenset[str], fallback: Snapshot | None) -> Snapshot:
        """Return these weights with the optional tensors called ``names``, and no others.

        Those that are missing here are taken from ``fallback``, if it has them.
        """
        surplus, missing = (self.optional & self.tensors.keys()) - names, names - self.tensors.keys()
        if not surplus and not missing:
            return self
        tensors = {name: tensor for name, tensor in self.tensors.items() if name not in surplus}
        if fallback is not None:
            tensors |= {name: fallback.tensors[name] for name in sorted(missing) if name in fallback.tensors}
        return replace(self, tensors=tensors, optional=self.optional | names)


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside the wrappers of ``torch.compile`` and data parallelism, which add a prefix to its names."""
    inner: nn.Module | None = None
    if type(module).__name__ == "OptimizedModule":
        inner = module._modules.get("_orig_mod")
    elif isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        inner = module.module
    return module if inner is None else unwrap(inner)


class ModuleIndex:
    """The place of each named tensor of a module, and whether the module is still the same.

    Modules are trees of plain dictionaries. An index holds the dictionary and the key of every tensor, so that a
    tensor that was replaced (``.to()``, a parametrisation) is found anew at no cost, and it notices when the tree
    itself has changed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._links: list[tuple[dict[str, Any], str]] = []  # from a module to each of its children
        self._children: list[nn.Module] = []
        self._tables: list[dict[str, Any]] = []
        self.parameters: dict[str, tuple[dict[str, Any], str]] = {}
        self.buffers: dict[str, tuple[dict[str, Any], str]] = {}
        self.extra: dict[str, nn.Module] = {}
        self._vacant: list[tuple[dict[str, Any], str]] = []
        optional: set[str] = set()
        self._walk(unwrap(module), "", optional)
        self.optional = frozenset(optional)
        self._sizes = [len(table) for table in self._tables]

    def _walk(self, module: nn.Module, prefix: str, optional: set[str]) -> None:
        if isinstance(module, ScriptModule):
            if not any(True for _ in chain(module.parameters(), module.buffers())):
                return  # an activation, say: there is nothing to carry
            name = prefix.rstrip(".") or type(module).__name__
            raise LayoutMismatch(
                f"'{name}' is a TorchScript module: synchronise the module that it was made from, "
                "with which it shares its tensors, and call it inside wsync.gate(); or send its state_dict()"
            )
        for kind, found in ((module._parameters, self.parameters), (module._buffers, self.buffers)):
            self._tables.append(kind)
            for key, tensor in kind.items():
                if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
                    raise LayoutMismatch(
                        f"'{prefix}{key}' has no shape yet (a lazy module): run one forward before it is synchronised"
                    )
                if tensor is None:
                    self._vacant.append((kind, key))
                else:
                    found[prefix + key] = (kind, key)
        optional.update(prefix + key for key in module._non_persistent_buffers_set)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            self.extra[prefix + EXTRA] = module
        self._require_all(module, prefix)
        self._tables.append(module._modules)
        for key, child in module._modules.items():
            if child is not None:
                self._links.append((module._modules, key))
                self._children.append(child)
                self._walk(child, f"{prefix}{key}.", optional)

    def _require_all(self, module: nn.Module, prefix: str) -> None:
        """Check that a module that saves its state by a method of its own has no tensors besides those found here."""
        if type(module)._save_to_state_dict is nn.Module._save_to_state_dict:
            return
        kept: dict[str, Any] = {}
        module._save_to_state_dict(kept, prefix, keep_vars=True)
        own = {_memory(tensor) for tensor in chain(module.parameters(), module.buffers())}
        unknown = kept.keys() - self.parameters.keys() - self.buffers.keys() - self.extra.keys()
        odd = sorted(name for name in unknown if _has_others(kept[name], own))
        if odd:
            raise LayoutMismatch(
                f"{type(module).__name__} has weights that are neither parameters nor buffers (is it quantised?), and "
                f"cannot be carried: {describe(odd)}; synchronise the modules beside it"
            )

    def describes(self, module: nn.Module) -> bool:
        """Whether this is the index of ``module``, as it is now."""
        return (
            self._module() is module
            and [len(table) for table in self._tables] == self._sizes
            and all(map(is_, [where.get(key) for where, key in self._links], self._children))
        )

    @property
    def complete(self) -> bool:
        """Whether the places that had no tensor (a layer without bias) have none now, and the others have one."""
        vacated = any(where.get(key) is None for where, key in chain(self.parameters.values(), self.buffers.values()))
        return not vacated and not any(where[key] is not None for where, key in self._vacant)

    @property
    def places(self) -> dict[str, tuple[dict[str, Any], str]]:
        """``{name: (dictionary, key)}`` of every parameter and buffer."""
        return {**self.parameters, **self.buffers}

    def tree(self, names: Sequence[str]) -> loops.TensorTree:
        """Return what finds the tensors called ``names``, for as long as ``describes`` and ``complete`` are true."""
        places = self.places
        links = tuple((where, key, child) for (where, key), child in zip(self._links, self._children, strict=True))
        wanted = tuple(places[name] for name in names)
        return loops.TensorTree(wanted, links, tuple(self._vacant), tuple(self._tables))

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter and buffer by name, as they are now."""
        return {name: where[key] for name, (where, key) in self.places.items()}

    def extra_state(self) -> dict[str, Any]:
        """The present extra state of each module with ``get_extra_state``."""
        return {name: module.get_extra_state() for name, module in self.extra.items()}

    def snapshot(self) -> Snapshot:
        """The module's weights as they are now."""
        return Snapshot(self.tensors(), self.extra_state(), self.optional)


def _memory(tensor: Tensor) -> tuple[str, int]:
    """Equal for tensors in the same memory, under whatever names."""
    if tensor.layout is not torch.strided or is_sharded(tensor):  # without memory, or with memory elsewhere
        return "is", id(tensor)
    return "at", tensor.untyped_storage().data_ptr()


def _has_others(saved: Any, own: Collection[tuple[str, int]]) -> bool:
    """Whether what a module saves has tensors elsewhere than in its ``own`` memory, or hides them; a number is none."""
    if isinstance(saved, Tensor):
        return _memory(saved) not in own
    if isinstance(saved, list | tuple):
        return any(_has_others(one, own) for one in saved)
    return isinstance(saved, torch.ScriptObject)


def snapshot(source: object) -> Snapshot:
    """The canonical form of a module, a TensorDict (nested or flat) or a state dict.

    Raises:
        LayoutMismatch: a lazy module without shapes; or two names become one: ``{"a": {"b": …}, "a.b": …}``.
        TypeError: ``source``, or a value in it, is none of these.
    """
    if isinstance(source, TensorDictBase):
        return _of_tensordict(source)
    if isinstance(source, nn.Module):
        return ModuleIndex(source).snapshot()
    if isinstance(source, Mapping):
        pairs = _by_name(list(_flatten(source, "")))
        extra = {name: value for name, value in pairs.items() if is_extra(name)}
        return Snapshot({name: pairs[name] for name in pairs if name not in extra}, extra)
    raise no_weights(source)


def no_weights(source: object) -> TypeError:
    """Return the error of a ``source`` that is not weights."""
    return TypeError(f"weights are a torch.nn.Module, a TensorDict or a state dict, not a {type(source).__name__}")


def weights_of(first: Any, second: Any, model_id: str | None = None) -> Any:
    """Return the weights in ``send_weights(weights)`` or, of the older API, ``send_weights(model_id, weights)``.

    Args:
        first: the first argument.
        second: the second one; None if there is none.
        model_id: the model id of the transport's model, where it is known.

    Raises:
        TypeError: two arguments, and the first is no name.
        ValueError: the name is another model's.
    """
    if not isinstance(first, str):
        if second is not None:
            raise TypeError(
                f"send_weights(weights) or send_weights(model_id, weights), not ({type(first).__name__}, …)"
            )
        return first
    if model_id is not None and first != model_id:
        raise ValueError(f"this transport carries the model '{model_id}', not '{first}'")
    return second


def is_extra(name: str) -> bool:
    """Return whether a name is that of a module's extra state."""
    return name == EXTRA or name.endswith("." + EXTRA)


def _by_name(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = [f"'{name}'" for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise LayoutMismatch(f"two weights have one name: {describe(repeated)}")
    return found


def _of_tensordict(source: TensorDictBase) -> Snapshot:
    tensors: dict[str, Tensor] = {}
    extra: dict[str, Any] = {}
    leaves = list(source.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor))
    named = [(path if isinstance(path, str) else ".".join(path), (path, value)) for path, value in leaves]
    for name, (path, value) in _by_name(named).items():
        if is_extra(name):
            extra[name] = value if isinstance(value, Tensor) else source[path]
        elif isinstance(value, Tensor):
            tensors[name] = value
        else:
            raise TypeError(f"'{name}' is a {type(value).__name__}; weights are tensors")
    return Snapshot(tensors, extra or None)


def is_stacked(weights: object) -> bool:
    """Return whether reading some of its tensors makes new ones, so that a copy into them would be lost."""
    return isinstance(weights, TensorDictBase) and any(
        isinstance(part, LazyStackedTensorDict)
        for part in (weights, *weights.values(include_nested=True, leaves_only=False))
    )


def _flatten(source: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in source.items():
        name = f"{prefix}{key}"
        if is_extra(name) or isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, Mapping):
            yield from _flatten(value, name + ".")
        else:
            raise TypeError(f"'{name}' is a {type(value).__name__}; a state dict holds tensors")


def describe(problems: Sequence[str], limit: int = 8) -> str:
    """Problems in one readable sentence, the first few of them whole."""
    shown = "; ".join(problems[:limit])
    return shown if len(problems) <= limit else f"{shown}; and {len(problems) - limit} more"
