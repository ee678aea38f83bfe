"""One canonical form for a model's weights, whatever they come as: flat dotted names, tensors, extra state."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from tensordict import TensorDictBase, is_leaf_nontensor
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from wsync.errors import LayoutMismatch
from wsync.native import native
from wsync.weights.tensors import describe, digest_of

if TYPE_CHECKING:
    from wsync.transforms import Chain

EXTRA = "_extra_state"
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


class Snapshot(NamedTuple):
    """A model's weights by dotted name. The tensors are the source's own: nothing is copied."""

    tensors: Mapping[str, Tensor]  # parameters and buffers
    extra: Mapping[str, Any] | None = None  # {"layer._extra_state": object}; None where the format cannot say
    optional: frozenset[str] = frozenset()  # names that another format may lack: of non-persistent buffers
    model_may_have_more: bool = False  # whether they are a part of a model on purpose

    def with_optional(self, names: Collection[str]) -> Snapshot:
        """Return these weights without the optional tensors that are not among ``names``."""
        surplus = (self.optional & self.tensors.keys()).difference(names)
        kept = {name: tensor for name, tensor in self.tensors.items() if name not in surplus}
        return self._replace(tensors=kept) if surplus else self

    def through(self, transform: Chain | None, *, strict: bool = False) -> Snapshot:
        """Return these weights transformed; ``strict``: they are a whole model. A part has no extra state."""
        if transform is None:
            return self
        selects, tensors = transform.selects, transform(self.tensors, strict)
        extra = None if selects else self.extra
        return self._replace(tensors=tensors, extra=extra, model_may_have_more=self.model_may_have_more or selects)


def is_module(source: object) -> TypeGuard[nn.Module]:
    """Return whether ``source`` is a module; TensorDictParams are both, and are read as a TensorDict."""
    return isinstance(source, nn.Module) and not isinstance(source, TensorDictBase)


def plain_name(name: str) -> str:
    """Return a name without the components that ``torch.compile``, checkpointing and FSDP add, at any depth."""
    parts = name.split(".")
    return name if _WRAPPERS.isdisjoint(parts) else ".".join(part for part in parts if part not in _WRAPPERS)


class ModuleIndex:
    """The place of each named tensor of a module: a dictionary and a key.

    So a tensor that was replaced (``.to()``, a parametrisation) is found anew at no cost. Names have no components of
    wrappers, data parallelism included. The module is not kept alive, but its children are.
    """

    def __init__(self, module: nn.Module, on_death: Callable[[Any], object] | None = None) -> None:
        self._module = weakref.ref(module, on_death)
        self._links: list[tuple[dict[str, Any], str, nn.Module]] = []  # from a module to each of its children
        self._tables: list[dict[str, Any]] = []
        self._vacant: list[tuple[dict[str, Any], str]] = []  # without a tensor: a layer without bias
        self.places: dict[str, tuple[dict[str, Any], str]] = {}  # of parameters and buffers
        self.parameters = set[str]()  # the names of the former
        self.optional = set[str]()  # those of non-persistent buffers
        self.self_written = set[str]()  # those of parameters that their module's own forward writes
        self.extra: dict[str, nn.Module] = {}  # the modules with an extra state, by its name
        self._walk(module, "")
        self.tree = self.tree_of(self.places)  # what finds all tensors; None without the C extension

    def _walk(self, module: nn.Module, prefix: str) -> None:
        if isinstance(module, ScriptModule):
            if not module.state_dict():
                return  # an activation, say: there is nothing to carry
            name = prefix.rstrip(".") or type(module).__name__
            raise LayoutMismatch(f"'{name}' is a TorchScript module: synchronise the module that it was made from")
        self._tables += [module._parameters, module._buffers, module._modules]
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
                    raise LayoutMismatch(
                        f"'{prefix}{key}' has no shape yet (a lazy module): run one forward before it is synchronised"
                    )
                if tensor is None:
                    self._vacant.append((table, key))
                else:
                    self.places[prefix + key] = (table, key)
        self.parameters.update(prefix + key for key, tensor in module._parameters.items() if tensor is not None)
        self.optional.update(prefix + key for key in module._non_persistent_buffers_set)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            self.self_written.add(prefix + "weight")
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            self.extra[prefix + EXTRA] = module
        parallel = isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)
        for key, child in module._modules.items():
            if child is not None:
                self._links.append((module._modules, key, child))
                self._walk(child, prefix if key in _WRAPPERS or parallel else f"{prefix}{key}.")

    def tree_of(self, names: Iterable[str]) -> Any:
        """Return the ``native.TensorTree`` that finds the tensors called ``names``; None without the C extension."""
        if native is None:
            return None
        places = tuple(self.places[name] for name in names)
        return native.TensorTree(places, tuple(self._links), tuple(self._vacant), tuple(self._tables))

    def current(self) -> Sequence[Tensor] | None:
        """Return all tensors as they are now; None once the module has changed its structure."""
        if self.tree is not None:
            return self.tree.tensors()
        module = self._module()
        if module is None:
            return None
        now = ModuleIndex(module)
        same = [*now.places] == [*self.places] and all(map(is_, now._tables, self._tables))
        return [*now.tensors().values()] if same else None

    def tensors(self) -> dict[str, Tensor]:
        return {name: where[key] for name, (where, key) in self.places.items()}

    def extra_state(self) -> dict[str, Any]:
        return {name: module.get_extra_state() for name, module in self.extra.items()}

    def snapshot(self) -> Snapshot:
        return Snapshot(self.tensors(), self.extra_state(), frozenset(self.optional))


def require_digests(model: object, digests: Mapping[str, int], version: object) -> None:
    """Raise ``LayoutMismatch`` if a model's tensors have other digests; None: a function has loaded them."""
    if model is None:
        raise LayoutMismatch("a function has loaded the weights: what it has made of them is not known")
    own = snapshot(model).tensors
    wrong = [f"'{name}'" for name, one in digests.items() if name not in own or digest_of(own[name]) != one]
    if wrong:
        raise LayoutMismatch(f"it has version {version}, with other values, or none, of {describe(wrong)}")


def snapshot(source: object) -> Snapshot:
    """Return the canonical form of a module, a TensorDict (nested or flat) or a state dict.

    LayoutMismatch: a lazy module without shapes; or two names become one (``{"a": {"b": …}, "a.b": …}``). TypeError:
    ``source``, or a value in it, is none of these.
    """
    if is_module(source):
        return ModuleIndex(source).snapshot()
    if isinstance(source, TensorDictBase):
        leaves = source.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)
        pairs = [(dotted(key), value if isinstance(value, Tensor) else source[key]) for key, value in leaves]
    elif isinstance(source, Mapping):
        pairs = [*_flatten(source, "")]
    else:
        raise no_weights(source)
    pairs = [(plain_name(name), value) for name, value in pairs]
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = [f"'{name}'" for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise LayoutMismatch(f"two weights have one name: {describe(repeated)}")
    extra = {name: value for name, value in found.items() if is_extra(name)}
    tensors = {name: value for name, value in found.items() if name not in extra}
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"'{name}' is a {type(value).__name__}; weights are tensors (see torch.from_numpy())")
    return Snapshot(tensors, extra or None if isinstance(source, TensorDictBase) else extra)


def no_weights(source: object) -> TypeError:
    """Return the error of what is not weights."""
    return TypeError(f"weights are a torch.nn.Module, a TensorDict or a state dict, not a {type(source).__name__}")


def dotted(key: object) -> str:
    """Return a key of a TensorDict or a mapping as a name."""
    return ".".join(key) if isinstance(key, tuple) else str(key)


def is_extra(name: str) -> bool:
    """Return whether a name is that of a module's extra state."""
    return name == EXTRA or name.endswith("." + EXTRA)


def _flatten(source: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in source.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and not is_extra(name):
            yield from _flatten(value, name + ".")
        else:
            yield name, value
