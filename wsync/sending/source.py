"""The weights that a sender reads for each update, and which worker gets which."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tensordict import TensorDictBase
from torch import Tensor, nn

from wsync.errors import LayoutMismatch, NotConnected
from wsync.loops import TensorTree
from wsync.sending.membership import as_plain_integer
from wsync.sending.tensor_finders import ModuleFinder, TensorFinder, TransformedFinder
from wsync.shm.registered import RegisteredBuffers
from wsync.transforms.chain import Chain
from wsync.weights.layout import Layout
from wsync.weights.listing import Listing
from wsync.weights.snapshot import ModuleIndex, Snapshot, describe, no_weights, snapshot
from wsync.weights.strategy import WeightStrategy

_PARTIAL = -1  # the key in ``_chains`` of the transform for partial updates

DeviceMap = Callable[[int, Any], Any]
"""``(worker_idx, weights) -> weights`` for that worker."""


class Part(NamedTuple):
    """The same weights for some workers, checked against the layout."""

    workers: Sequence[int]
    tensors: list[Tensor]
    extra: Mapping[str, Any] | None


class Reader:
    """Reads weights, and remembers where the tensors of the last module are. Used by the sending thread."""

    def __init__(self) -> None:
        self._index: ModuleIndex | None = None
        self._places: list[tuple[dict[str, Any], str]] = []  # of the index's tensors, in the layout's order
        self._layout: Layout | None = None
        self._tree: TensorTree | None = None  # the same places, for the fast path

    def read(self, source: object) -> Snapshot:
        """Return the canonical form of ``source``, as it is now."""
        if isinstance(source, nn.Module) and not isinstance(source, TensorDictBase):
            index = self._current(source)
            if index is None:
                index = self._index = ModuleIndex(source)
                self._layout = self._tree = None
            return index.snapshot()
        return snapshot(source)

    def _current(self, source: nn.Module) -> ModuleIndex | None:
        """Return the index if it describes ``source`` and nothing was added to it."""
        index = self._index
        return index if index is not None and index.describes(source) and index.complete else None

    def read_unchanged(self, module: nn.Module) -> Snapshot | None:
        """Return the weights of the module that was read last; None if it has changed, or has extra state."""
        index = self._current(module)
        return None if index is None or index.extra else Snapshot(index.tensors(), None, index.optional)

    def read_module(self, source: object, layout: Layout) -> tuple[list[Tensor], Mapping[str, Any]] | None:
        """Return the tensors of a module that was read before, in the layout's order and checked, and its extra state.

        None if ``source`` is not that module, or has changed.
        """
        index = self._placed(source, layout)
        if index is None:
            return None
        tensors = [where[key] for where, key in self._places]
        layout.check(tensors)
        return tensors, index.extra_state()

    def _placed(self, source: object, layout: Layout) -> ModuleIndex | None:
        """Return the index of a module that was read before, if it has the layout's tensors; sets ``_places``."""
        index = self._current(source) if isinstance(source, nn.Module) else None
        if index is not None and self._layout is not layout:
            places = index.places
            names = set(layout.names)
            same_extra = index.extra.keys() == (layout.extra or frozenset())
            if not same_extra or not names <= places.keys() <= names | index.optional:
                return None
            self._places, self._layout = [places[name] for name in layout.names], layout
            self._tree = None if index.extra else index.tree(layout.names)
        return index

    def finder(self, source: object, layout: Layout) -> TensorFinder | None:
        """Return a finder for weights like those last read; None if their form has none."""
        if isinstance(source, nn.Module) and not isinstance(source, TensorDictBase):
            if self._placed(source, layout) is None or self._tree is None:
                return None
            return ModuleFinder(source, self._tree)
        return Listing.of(source, layout.names)


def per_worker(weights: object) -> dict[int, Any] | None:
    """Return each worker's weights, if ``weights`` are ``{worker_idx: weights}``; otherwise None.

    Indices may be integers of any type, as ``worker_ids`` may; they are returned as plain ones.

    Raises:
        ValueError: a worker has weights twice: equal tensors are different keys.
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


class Source:
    """A model, live weights, or weights per worker; read again for every update. Used by the sending thread.

    Args:
        weights: module, TensorDict, state dict or ``{worker: any of these}``; None if every send is given its own.
        strategy: the format that ``device_map_fn`` is given; also writes the mirror.
        device_map_fn: ``(worker_idx, weights) -> weights``, applied for each worker.
        own_buffers: whether every worker gets a part (and so a buffer) of its own, even if all parts are equal.
        mirror: the user's own buffers. Weights that are the same for all workers are also written into them, as they
            are before the transform.
        transform: applied to the weights before they are packed.

    Raises:
        TypeError: the weights, or the map, are of a wrong type.
        ValueError: weights per worker together with a map that would make them.
    """

    def __init__(
        self,
        weights: object = None,
        strategy: WeightStrategy | None = None,
        *,
        device_map_fn: DeviceMap | None = None,
        own_buffers: bool = False,
        mirror: TensorDictBase | None = None,
        transform: Chain | None = None,
    ) -> None:
        if weights is not None and not isinstance(weights, nn.Module | TensorDictBase | Mapping):
            raise no_weights(weights)
        if device_map_fn is not None and not callable(device_map_fn):
            raise TypeError(f"device_map_fn is a function of a worker's index and weights, not {device_map_fn!r}")
        if device_map_fn is not None and per_worker(weights) is not None:
            raise ValueError("these are each worker's own weights already: leave device_map_fn out")
        self.weights = mirror if weights is None else weights
        self.mirror = mirror
        self.registered: RegisteredBuffers | None = None  # where the mirror lies in shared memory: the sender writes it
        self._strategy = strategy or WeightStrategy()
        self._device_map_fn = device_map_fn
        self._own_buffers = own_buffers
        self._transform = transform
        self._chains: dict[int, Chain] = {}  # by worker, where workers get different weights
        self._reader = Reader()
        self._fallback_reader = Reader()  # reads ``weights``, for optional tensors that an update lacks
        self._alike = device_map_fn is None and mirror is None and not own_buffers  # one part for all workers

    @property
    def changes_weights(self) -> bool:
        """Whether other weights are sent than those given: made by a ``device_map_fn`` or a ``send_transform``."""
        return self._device_map_fn is not None or self._transform is not None

    def first(self, weights: object) -> Snapshot:
        """Return one worker's weights, which define the layout.

        Raises:
            NotConnected: there are none yet.
        """
        given = self._given(weights)
        by_worker = per_worker(given)
        return self._transformed(self._reader.read(given if by_worker is None else next(iter(by_worker.values()))))

    def _transformed(self, weights: Snapshot, worker: int = 0) -> Snapshot:
        """Return ``weights`` as they are sent. A chain's result is valid until its next call: one chain per worker."""
        if self._transform is None:
            return weights
        if worker not in self._chains:
            self._chains[worker] = copy.deepcopy(self._transform)
        transform = self._chains[worker]
        extra = None if transform.selects else weights.extra
        return Snapshot(transform(weights.tensors), extra, weights.optional, transform.selects)

    def _given(self, weights: object) -> object:
        """Return ``weights``, or the source's own."""
        given = self.weights if weights is None else weights
        if given is None:
            raise NotConnected("nothing to send: no model or weights were given, neither at init nor now")
        return given

    def finder(self, weights: object, layout: Layout) -> TensorFinder | None:
        """Return a finder for updates like this one; None if workers get different weights, or there is none."""
        given = self.weights if weights is None else weights
        if not self._alike:
            return None
        if self._transform is None:
            return self._reader.finder(given, layout)
        if not isinstance(given, nn.Module) or isinstance(given, TensorDictBase):
            return None
        if any(one.device.type != "cpu" for one in given.parameters()):
            return None  # the fast path packs tensors in main memory: the transform would run again for the full send
        return TransformedFinder(given, self._transformed_module, layout.names)

    def _transformed_module(self, module: nn.Module) -> Mapping[str, Tensor] | None:
        """Return the weights of a module as they are sent; None if it has changed since the last update."""
        known = self._reader.read_unchanged(module)
        return None if known is None else self._transformed(known).tensors

    def parts(
        self,
        weights: object,
        workers: Sequence[int],
        absent: Sequence[int],
        layout: Layout,
        rest: Sequence[Tensor] | None = None,
    ) -> Iterable[Part]:
        """Return the weights of each worker, checked. Those that ``device_map_fn`` makes are made one by one.

        Args:
            weights: the update; None reads the source's own.
            workers: the workers that must get weights.
            absent: absent workers, which get the same as the others, and need not be named in weights per worker.
            layout: of the weights.
            rest: in the layout's order; completes ``weights``, where those are a part of the model.

        Raises:
            LayoutMismatch: some weights do not fit.
            NotConnected: there are none.
            ValueError: weights per worker lack one of ``workers``, or name another.
        """
        given = self._given(weights)
        by_worker = per_worker(given)
        if by_worker is not None:
            if weights is None:
                by_worker = {worker: own for worker, own in by_worker.items() if worker in workers or worker in absent}
            wrong = sorted((by_worker.keys() ^ set(workers)) - set(absent))
            if wrong:
                raise ValueError(f"weights per worker must be for workers {list(workers)}; worker(s) {wrong} differ")
            return [self._part([worker], own, layout) for worker, own in by_worker.items()]
        everyone = [*workers, *absent] if absent else workers
        if rest is not None:
            return [self._completed(everyone, given, layout, rest)]
        if self._device_map_fn is None:
            part = self._part(everyone, given, layout)
            if self.mirror is not None and given is not self.mirror and self.registered is None:
                self._strategy.apply_weights(self.mirror, given)
            return [Part([worker], part.tensors, part.extra) for worker in everyone] if self._own_buffers else [part]
        expressed = self._strategy.express(self._reader.read(given))
        return self._mapped_parts(everyone, expressed, layout, self._device_map_fn)

    def _mapped_parts(
        self, workers: Sequence[int], weights: object, layout: Layout, device_map_fn: DeviceMap
    ) -> Iterator[Part]:
        """Yield the weights that are made for each worker; no earlier ones are kept here."""
        for worker in workers:
            yield self._ordered([worker], snapshot(device_map_fn(worker, weights)), layout)

    def _completed(self, workers: Sequence[int], given: object, layout: Layout, rest: Sequence[Tensor]) -> Part:
        """Return a part of a model, completed by ``rest``."""
        if self.mirror is not None or self._device_map_fn is not None or self._own_buffers:
            raise ValueError("a partial update needs a scheme without registered buffers or weights per worker")
        some = self._transformed(snapshot(given), _PARTIAL).tensors
        unknown = [name for name in some if name not in layout.names]
        if unknown:
            raise LayoutMismatch(f"a partial update has weights that are not the model's: unknown {describe(unknown)}")
        if not some:
            raise LayoutMismatch("a partial update has no weights")
        tensors = [some.get(name, old) for name, old in zip(layout.names, rest, strict=True)]
        layout.check(tensors)
        return Part(workers, tensors, None)

    def _part(self, workers: Sequence[int], given: object, layout: Layout) -> Part:
        known = self._reader.read_module(given, layout) if self._transform is None else None
        return self._ordered(workers, self._reader.read(given), layout) if known is None else Part(workers, *known)

    def _ordered(self, workers: Sequence[int], weights: Snapshot, layout: Layout) -> Part:
        if self._transform is not None:
            weights = self._transformed(weights, workers[0])
            return Part(workers, layout.order(weights), weights.extra)
        fallback = None
        if layout.optional and self.weights is not None and per_worker(self.weights) is None:
            fallback = self._fallback_reader.read(self.weights)
        return Part(workers, layout.order(weights, fallback), weights.extra)
