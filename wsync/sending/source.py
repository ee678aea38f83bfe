"""Where a sender takes weights from when a call brings none, and which worker gets which."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tensordict import TensorDictBase
from torch import Tensor, nn

from wsync.errors import NotConnected
from wsync.loops import TensorTree
from wsync.sending.locators import Locator, ModuleLocator
from wsync.sending.membership import as_plain_integer
from wsync.shm.registered import RegisteredBuffers
from wsync.weights.layout import Layout
from wsync.weights.listing import Listing
from wsync.weights.snapshot import ModuleIndex, Snapshot, no_weights, snapshot
from wsync.weights.strategy import WeightStrategy

DeviceMap = Callable[[int, Any], Any]
"""``(worker_idx, weights) -> weights`` for that worker."""


class Part(NamedTuple):
    """The same weights for some workers, checked against the layout."""

    workers: Sequence[int]
    tensors: list[Tensor]
    extra: Mapping[str, Any] | None


class Reader:
    """Reads a source again and again, and remembers where the tensors of a module are."""

    def __init__(self) -> None:
        self._index: ModuleIndex | None = None
        self._places: list[tuple[dict[str, Any], str]] = []  # of the index's tensors, in the layout's order
        self._layout: Layout | None = None
        self._tree: TensorTree | None = None  # the same places, the fast path

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

    def read_module(self, source: object, layout: Layout) -> tuple[list[Tensor], Mapping[str, Any]] | None:
        """Return the tensors of a module that was read before, in the layout's order and checked, and its extra state.

        None if ``source`` is anything else, or has changed.
        """
        index = self._placed(source, layout)
        if index is None:
            return None
        tensors = [where[key] for where, key in self._places]
        layout.check(tensors)
        return tensors, index.extra_state()

    def _placed(self, source: object, layout: Layout) -> ModuleIndex | None:
        """The index of a module that was read before, if it has the layout's tensors; their places are known then."""
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

    def locator(self, source: object, layout: Layout) -> Locator | None:
        """Return what finds the tensors of weights like those last read; None if there is no such shortcut."""
        if isinstance(source, nn.Module) and not isinstance(source, TensorDictBase):
            if self._placed(source, layout) is None or self._tree is None:
                return None
            return ModuleLocator(source, self._tree)
        return Listing.of(source, layout.names)


def per_worker(weights: object) -> dict[int, Any] | None:
    """Return each worker's weights, if ``weights`` are ``{worker_idx: weights}``; None if they are anything else.

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


class Source:
    """A model, live weights, or weights per worker; read anew for every update.

    Args:
        weights: module, TensorDict, state dict or ``{worker: any of these}``; None if every send brings its own.
        strategy: the format that ``device_map_fn`` is given; also writes the mirror.
        device_map_fn: ``(worker_idx, weights) -> weights``, applied for each worker.
        apart: whether every worker gets a part (and so a buffer) of its own, even where all parts are equal.
        mirror: the user's own buffers; everything that is sent is written into them as well.

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
        apart: bool = False,
        mirror: TensorDictBase | None = None,
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
        self._apart = apart
        self._reader = Reader()
        self._own = Reader()
        self._alike = (
            device_map_fn is None and mirror is None and not apart
        )  # all workers get the same, and nothing else has to be done

    def first(self, weights: object) -> Snapshot:
        """Return one worker's weights, which define the layout.

        Raises:
            NotConnected: there are none yet.
        """
        given = self._given(weights)
        apart = per_worker(given)
        return self._reader.read(given if apart is None else next(iter(apart.values())))

    def _given(self, weights: object) -> object:
        """Return what an update is made from."""
        given = self.weights if weights is None else weights
        if given is None:
            raise NotConnected("nothing to send: no model or weights were given, neither at init nor now")
        return given

    def locator(self, weights: object, layout: Layout) -> Locator | None:
        """Return how to find the tensors of updates like this one; None if workers get different ones."""
        return self._reader.locator(self.weights if weights is None else weights, layout) if self._alike else None

    def parts(self, weights: object, workers: Sequence[int], absent: Sequence[int], layout: Layout) -> list[Part]:
        """Return what each of ``workers`` is to be sent; all of it is checked first.

        Args:
            weights: the update; None reads the source's own.
            workers: those that must get weights.
            absent: those that get the same as the others, and need not be named in weights per worker.
            layout: of the weights.

        Raises:
            LayoutMismatch: some weights do not fit.
            NotConnected: there are none.
            ValueError: weights per worker lack one of ``workers``, or name another.
        """
        given = self._given(weights)
        apart = per_worker(given)
        if apart is not None:
            if weights is None:
                apart = {worker: own for worker, own in apart.items() if worker in workers or worker in absent}
            odd = sorted((apart.keys() ^ set(workers)) - set(absent))
            if odd:
                raise ValueError(f"weights per worker must be for workers {list(workers)}; worker(s) {odd} differ")
            return [self._part([worker], own, layout) for worker, own in apart.items()]
        everyone = [*workers, *absent] if absent else workers
        if self._device_map_fn is None:
            part = self._part(everyone, given, layout)
            if self.mirror is not None and given is not self.mirror and self.registered is None:
                self._strategy.apply_weights(self.mirror, given)
            return [Part([worker], part.tensors, part.extra) for worker in everyone] if self._apart else [part]
        expressed = self._strategy.express(self._reader.read(given))
        return [self._part([worker], self._device_map_fn(worker, expressed), layout) for worker in everyone]

    def _part(self, workers: Sequence[int], given: object, layout: Layout) -> Part:
        known = self._reader.read_module(given, layout)
        if known is not None:
            return Part(workers, *known)
        weights = self._reader.read(given)
        fallback = None
        if layout.optional and self.weights is not None and per_worker(self.weights) is None:
            fallback = self._own.read(self.weights)
        return Part(workers, layout.order(weights, fallback), weights.extra)
