"""The weights that a sender reads for each update, which worker gets which, and finding those of a known form again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor, nn

from wsync.errors import LayoutMismatch, NotConnected
from wsync.weights.layout import Buffer, Layout
from wsync.weights.snapshot import ModuleIndex, Snapshot, dotted, is_module, no_weights, plain_name, snapshot
from wsync.weights.strategy import WeightStrategy
from wsync.weights.tensors import describe

if TYPE_CHECKING:
    from wsync.transforms import Chain

DeviceMap = Callable[[int, Any], Any]
"""``(worker_idx, weights) -> weights`` for that worker."""


Part = tuple[Sequence[int], list[Tensor], Mapping[str, Any] | None]
"""Workers, and the weights that are the same for them, checked against the layout: tensors and extra state."""


def as_plain_integer(value: Any) -> Any:
    """Return an integer of any type as a plain one (equal tensors are different keys), other values unchanged."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def per_worker(weights: object) -> dict[int, Any] | None:
    """Return each worker's weights, if ``weights`` are ``{worker_idx: weights}``; otherwise None.

    Indices may be integers of any type, as ``worker_ids`` may. ValueError: a worker has weights twice.
    """
    if isinstance(weights, nn.Module | TensorDictBase) or not isinstance(weights, Mapping):
        return None
    found: dict[int, Any] = {}
    for key, own in weights.items():
        worker = as_plain_integer(key)
        if type(worker) is not int:
            return None
        if worker in found:
            raise ValueError(f"worker {worker} has weights twice")
        found[worker] = own
    return found or None


def extracted(weights: Any, strategy: WeightStrategy) -> Any:
    """Return ``weights`` in the format of ``strategy``; ``{worker: …}`` where workers differ."""
    by_worker = per_worker(weights)
    if by_worker is None:
        return strategy.extract_weights(weights)
    return {worker: strategy.extract_weights(own) for worker, own in by_worker.items()}


def repointing(registered: object) -> Callable[[Buffer], None]:
    """Return what lets registered weights use the memory of each published slot: they show what the workers have.

    They stay the same tensors; what else refers to their former memory is not followed. A tensor of another shape or
    dtype, because a transform has changed what is sent, keeps its own memory.
    """
    tensors = snapshot(registered).tensors
    latest: list[Buffer] = []  # it is not reused while the tensors lie in it

    def repoint(buffer: Buffer) -> None:
        for name, view in zip(buffer.layout.names, buffer.views, strict=True):
            own = tensors.get(name)
            if own is not None and own.shape == view.shape and own.dtype is view.dtype and own.device == view.device:
                own.data = view
        latest[:] = [buffer]

    return repoint


class Source:
    """A model, live weights, or weights per worker; read again for every update.

    ``strategy``: the format that ``device_map_fn`` is given. ``own_buffers``: whether every worker gets a part (and so
    a buffer) of its own, even if all parts are equal. ``undefined``: why no weights define the layout.
    ``persistent``: whether non-persistent buffers are left out.
    """

    def __init__(
        self,
        weights: object = None,
        strategy: WeightStrategy | None = None,
        *,
        device_map_fn: DeviceMap | None = None,
        own_buffers: bool = False,
        transform: Chain | None = None,
        undefined: str = "",
        persistent: bool = False,
    ) -> None:
        if weights is not None and not isinstance(weights, nn.Module | TensorDictBase | Mapping):
            raise no_weights(weights)
        if device_map_fn is not None and not callable(device_map_fn):
            raise TypeError(f"device_map_fn is a function of a worker's index and weights, not {device_map_fn!r}")
        if device_map_fn is not None and per_worker(weights) is not None:
            raise ValueError("these are each worker's own weights already: leave device_map_fn out")
        self.weights = weights
        self._undefined, self._persistent = undefined, persistent
        self._strategy = strategy or WeightStrategy()
        self._device_map_fn, self._own_buffers, self._transform = device_map_fn, own_buffers, transform
        self._optional = frozenset[str]()  # the non-persistent buffers of the first weights
        self._layout: Layout | None = None  # of the trees and forms
        self._indexes: dict[int, ModuleIndex] = {}  # of the living modules that were read, by ``id``
        self._trees: dict[int, Any] = {}  # what finds the tensors of those of them that were sent
        self._form: tuple[Any, ...] | None = None  # of the mapping that was sent last
        self._order: list[int] = []  # where it has each tensor of the layout

    def first(self, weights: object = None) -> Snapshot:
        """Return one worker's weights, which define the layout; NotConnected: there are none, or ``undefined``."""
        if self._undefined:
            raise NotConnected(self._undefined)
        given = self._given(weights)
        by_worker = per_worker(given)
        one = self._read(given if by_worker is None else next(iter(by_worker.values())))
        self._optional = frozenset(one.optional & one.tensors.keys())
        return one.through(self._transform, strict=True)

    def parts(
        self, weights: object, workers: Sequence[int], layout: Layout, rest: Sequence[Tensor] | None = None
    ) -> Iterable[Part]:
        """Return the weights of each worker, checked. ``rest`` completes ``weights`` that are a part of the model.

        LayoutMismatch: some do not fit; NotConnected: there are none; ValueError: not those of ``workers``.
        """
        given, change = self._given(weights), self._device_map_fn
        by_worker = per_worker(given)
        if by_worker is not None:
            if weights is None:
                by_worker = {worker: own for worker, own in by_worker.items() if worker in workers}
            wrong = sorted(by_worker.keys() ^ set(workers))
            if wrong:
                raise ValueError(f"weights per worker must be for workers {list(workers)}; worker(s) {wrong} differ")
            return (([worker], *self._part(own, layout)) for worker, own in by_worker.items())
        if rest is not None:
            return [(workers, self._completed(given, layout, rest), None)]
        if change is not None:
            formatted = self._strategy.extract_weights(given)
            return (([worker], *self._part(change(worker, formatted), layout)) for worker in workers)
        same = self._part(given, layout)
        return [([worker], *same) for worker in workers] if self._own_buffers else [(workers, *same)]

    def usual(self, weights: object, layout: Layout) -> Any:
        """Return the tensors of weights in a form that ``learn`` was given before, for ``Buffer.pack``, not checked.

        None if ``parts`` has to read the weights: they have another form, or extra state, or a transform, or workers
        get different ones.
        """
        if layout is not self._layout:
            return None
        given = self.weights if weights is None else weights
        tree = self._trees.get(id(given))
        if tree is not None or self._form is None or not _has_names(type(given)):
            return tree
        found = list[Any]()
        return [found[i] for i in self._order] if _read_form(given, found) == self._form else None

    def learn(self, weights: object, layout: Layout) -> None:
        """Keep the form of ``weights``, which all workers were sent, for ``usual``."""
        given = self.weights if weights is None else weights
        if self._transform or self._device_map_fn or self._own_buffers or per_worker(given) is not None:
            return
        if layout is not self._layout:
            self._layout, self._form = layout, None
            self._trees.clear()
        names = layout.names
        if is_module(given):
            index = self._index_of(given)
            if not index.extra and {*names} <= index.places.keys() <= {*names} | index.optional:
                self._trees[id(given)] = index.tree_of(names)
        elif _has_names(type(given)):
            at = {name: i for i, name in enumerate(_names(given))}
            if at.keys() == {*names}:
                self._form, self._order = _read_form(given, []), [at[name] for name in names]

    def _index_of(self, module: nn.Module) -> ModuleIndex:
        key, indexes, trees = id(module), self._indexes, self._trees
        if key not in indexes or indexes[key].current() is None:
            # The index keeps the module's children alive. It is dropped with the module, before another has its ``id``.
            indexes[key] = ModuleIndex(module, lambda _: (indexes.pop(key, None), trees.pop(key, None)))
        return indexes[key]

    def _given(self, weights: object) -> object:
        given = self.weights if weights is None else weights
        if given is None:
            raise NotConnected("nothing to send: no model or weights were given, neither at init nor now")
        return given

    def _read(self, given: object) -> Snapshot:
        read = self._index_of(given).snapshot() if is_module(given) else snapshot(given)
        return read.with_optional(()) if self._persistent else read

    def _part(self, given: object, layout: Layout) -> tuple[list[Tensor], Mapping[str, Any] | None]:
        """Return weights and extra state, with the non-persistent buffers of the first ones: a state dict has none."""
        read = self._read(given).with_optional(self._optional)
        missing = self._optional - read.tensors.keys()
        if missing and self.weights is not None and per_worker(self.weights) is None:
            own = self._read(self.weights).tensors
            read = read._replace(tensors={**read.tensors, **{name: own[name] for name in missing if name in own}})
        sent = read.through(self._transform)  # not strict: a state dict may lack what is dropped
        return layout.order(sent), sent.extra

    def _completed(self, given: object, layout: Layout, rest: Sequence[Tensor]) -> list[Tensor]:
        if self._device_map_fn is not None or self._own_buffers:
            raise ValueError("a partial update needs a scheme without weights per worker")
        some = snapshot(given).through(self._transform).tensors
        unknown = [name for name in some if name not in layout.names]
        if unknown or not some:
            problem = f"weights that are not the model's: unknown {describe(unknown)}" if unknown else "no weights"
            raise LayoutMismatch(f"a partial update has {problem}")
        names, leader_of = layout.names, dict(layout.ties)
        leaders = [leader_of.get(index, index) for index in range(len(names))]
        by_leader = {leader: some[name] for name, leader in zip(names, leaders, strict=True) if name in some}
        tensors = [  # one name of a tied tensor is enough
            some.get(name, by_leader.get(leader, kept)) for name, leader, kept in zip(names, leaders, rest, strict=True)
        ]
        layout.check(tensors)
        return tensors


@cache
def _has_names(kind: type) -> bool:
    """Return whether objects of a class are TensorDicts or mappings: the class is asked once, for it costs as much."""
    return issubclass(kind, TensorDictBase | Mapping)


def _names(source: Any, prefix: str = "") -> Iterator[str]:
    """Yield the names of the tensors of a TensorDict or a mapping, in the order of reading."""
    for key, value in _entries(source):
        name = prefix + dotted(key)
        if _has_names(type(value)):
            yield from _names(value, name + ".")
        else:
            yield plain_name(name)


def _read_form(source: Any, found: list[Any]) -> tuple[Any, ...]:
    """Append the tensors of a TensorDict or a mapping; return its form: type, keys, and the forms of nested ones."""
    entries, nested = dict(_entries(source)), list[Any]()
    for value in entries.values():
        if _has_names(type(value)):
            nested.append(_read_form(value, found))
        else:
            found.append(value)
    return type(source), tuple(entries), tuple(nested)


def _entries(source: Any) -> Any:
    """Return the entries of one level; all leaves at once where a TensorDict is not a plain one."""
    if type(source) is TensorDict or not isinstance(source, TensorDictBase):
        return source.items()
    return source.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)
