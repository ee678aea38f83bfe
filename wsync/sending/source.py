"""Where a sender takes weights from, when it is given none, and for whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tensordict import TensorDictBase
from torch import Tensor, nn

from wsync import native
from wsync.errors import NotConnected
from wsync.sending.fast_path import Locator
from wsync.sending.membership import plain
from wsync.weights.layout import Layout
from wsync.weights.snapshot import Listing, ModuleIndex, Snapshot, no_weights, snapshot
from wsync.weights.strategy import WeightStrategy

_NOTHING = object()  # is no update
DeviceMap = Callable[[int, Any], Any]


class Part(NamedTuple):
    """The same weights for some workers, checked against the layout."""

    workers: Sequence[int]
    tensors: list[Tensor]
    extra: Mapping[str, Any] | None


class Reader:
    """Reads sources again and again, and remembers where the tensors of a module lie."""

    def __init__(self) -> None:
        self._index: ModuleIndex | None = None
        self._places: list[tuple[dict[str, Any], str]] = []  # of the index's tensors, in the layout's order
        self._layout: Layout | None = None
        self._tree: native.Tree | None = None  # the same places, the fast path

    def read(self, source: object) -> Snapshot:
        """The canonical form of ``source``, as it is now."""
        if isinstance(source, nn.Module) and not isinstance(source, TensorDictBase):
            index = self._current(source)
            if index is None:
                index = self._index = ModuleIndex(source)
                self._layout = self._tree = None
            return index.snapshot()
        return snapshot(source)

    def _current(self, source: nn.Module) -> ModuleIndex | None:
        """The index, if it is that of ``source`` and nothing has been added to it."""
        index = self._index
        return index if index is not None and index.describes(source) and index.complete else None

    def read_module(self, source: object, layout: Layout) -> tuple[list[Tensor], Mapping[str, Any]] | None:
        """The tensors of a module that was read before, in the layout's order and checked, and its extra state.

        None if ``source`` is anything else, or has changed: the fast path that most updates take.
        """
        index = self._current(source) if isinstance(source, nn.Module) else None
        if index is None:
            return None
        if self._layout is not layout:
            places = index.places
            names = set(layout.names)
            if index.extra.keys() != layout.extra or not names <= places.keys() <= names | index.optional:
                return None
            self._places, self._layout = [places[name] for name in layout.names], layout
            self._tree = None if index.extra else index.tree(layout.names)
        tensors = [where[key] for where, key in self._places]
        layout.check(tensors)
        return tensors, index.extra_state()

    def locator(self, source: object, layout: Layout) -> Locator | None:
        """How to find tensors like those last read, in the layout's order; None if that takes the slow path."""
        if self._index is not None and self._index.module is source:
            return Locator(source, self._tree) if self._tree is not None else None
        listing = Listing.of(source, layout.names)
        return None if listing is None else Locator(_NOTHING, None, listing)


def per_worker(weights: object) -> dict[int, Any] | None:
    """Each worker's weights, if ``weights`` are ``{worker_idx: weights}``; None if they are anything else.

    Indices may be integers of any type, as ``worker_ids`` may; they come back as plain ones.

    Raises:
        ValueError: some are for one worker twice: equal tensors are different keys.
    """
    if isinstance(weights, nn.Module | TensorDictBase) or not isinstance(weights, Mapping):
        return None
    found: dict[int, Any] = {}
    for key, own in weights.items():
        worker = plain(key)
        if type(worker) is not int:
            return None
        if worker in found:
            raise ValueError(f"weights per worker have worker {worker} twice")
        found[worker] = own
    return found or None


class Source:
    """A model, live weights, or weights per worker; read anew for every update.

    Args:
        weights: module, TensorDict, state dict or ``{worker: any of these}``; None if every send brings its own.
        strategy: whose format ``device_map_fn`` is given, and by which a mirror is written.
        device_map_fn: ``(worker_idx, weights) -> weights``, applied for each worker.
        apart: give every worker a part (and so a buffer) of its own, even where all parts are alike.
        mirror: the user's own buffers, into which everything that is sent is written as well.

    Raises:
        TypeError: the weights, or the map, are none.
        ValueError: weights per worker, and a map that would make them.
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
        self._strategy = strategy or WeightStrategy()
        self._device_map_fn = device_map_fn
        self._apart = apart
        self._reader = Reader()
        self._own = Reader()
        self._alike = (
            device_map_fn is None and mirror is None and not apart
        )  # everybody is given one thing, and only it

    def first(self, weights: object) -> Snapshot:
        """Any one worker's weights: what the layout is made from.

        Raises:
            NotConnected: there are none yet.
        """
        given = self._given(weights)
        apart = per_worker(given)
        return self._reader.read(given if apart is None else next(iter(apart.values())))

    def _given(self, weights: object) -> object:
        """What an update is to be made of."""
        given = self.weights if weights is None else weights
        if given is None:
            raise NotConnected("nothing to send: no model or weights were given, neither at init nor now")
        return given

    def locator(self, weights: object, layout: Layout) -> Locator | None:
        """How to find the tensors of updates like this one; None: slowly, or they differ from worker to worker."""
        return self._reader.locator(self.weights if weights is None else weights, layout) if self._alike else None

    def parts(self, weights: object, workers: Sequence[int], absent: Sequence[int], layout: Layout) -> list[Part]:
        """What each of ``workers`` is to be sent, all of it checked before any is.

        Args:
            weights: the update; None reads the source's own, of whoever is to have some.
            workers: who must be given something.
            absent: who is given the same as the others, and need not be named in weights per worker.
            layout: what the weights have to be like.

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
            if self.mirror is not None and given is not self.mirror:
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
