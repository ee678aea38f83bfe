"""Reading a sender's weights: a module's tensors are found at once where they were at the last update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor, nn

from wsync.loops import TensorTree
from wsync.sending.tensor_finders import ModuleFinder, TensorFinder
from wsync.weights.layout import Layout
from wsync.weights.listing import Listing
from wsync.weights.snapshot import ModuleIndex, Snapshot, snapshot


class Reader:
    """Reads weights, and stores where the last module's tensors are. Used by the thread that calls the scheme."""

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
