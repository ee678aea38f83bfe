"""Finding the tensors of weights in a form that was sent before: a module, a TensorDict, a state dict.

The finders are kept while the sender exists, so a trainer that alternates between forms is as fast as with one form.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from wsync.loops import TensorTree

_MAX_FINDERS = 8


class TensorFinder(Protocol):
    """Finds the tensors in weights of one form, in the layout's order. Used by the thread that calls the scheme."""

    def find(self, given: object) -> TensorTree | list[Tensor] | None:
        """Return the tensors of ``given``, or a tree that finds them; None if it has another form.

        Called for each update on the fast path.
        """
        ...

    def takes(self, given: object) -> bool:
        """Return whether ``given`` has this form, without finding or transforming its tensors."""
        ...


class ModuleFinder:
    """Finds the tensors of one module, and does not keep the module alive.

    Args:
        module: the module.
        tree: finds its tensors. It keeps the module's children alive, so it is dropped with the module.
    """

    def __init__(self, module: nn.Module, tree: TensorTree) -> None:
        self._module = weakref.ref(module, self._drop)
        self._tree: TensorTree | None = tree

    def _drop(self, _: object) -> None:
        self._tree = None

    def find(self, given: object) -> TensorTree | None:
        """See ``TensorFinder``."""
        return self._tree if self._module() is given else None

    def takes(self, given: object) -> bool:
        """See ``TensorFinder``."""
        return self._module() is given


class TransformedFinder:
    """Transforms the weights of one module, and does not keep the module alive.

    Args:
        module: the module.
        transform: returns its weights as they are sent, by name; None if it has changed, or has extra state.
        names: the names of the layout, in its order.
    """

    def __init__(
        self, module: nn.Module, transform: Callable[[nn.Module], Mapping[str, Tensor] | None], names: Sequence[str]
    ) -> None:
        self._module = weakref.ref(module)
        self._transform = transform
        self._names = names

    def find(self, given: object) -> list[Tensor] | None:
        """See ``TensorFinder``; the tensors are valid until the next call.

        Raises:
            LayoutMismatch: a transform does not fit the weights.
        """
        module = self._module()
        weights = self._transform(module) if module is not None and module is given else None
        if weights is None or len(weights) != len(self._names) or not all(name in weights for name in self._names):
            return None
        return [weights[name] for name in self._names]

    def takes(self, given: object) -> bool:
        """See ``TensorFinder``."""
        return self._module() is given


@dataclass(slots=True)
class TensorFinders:
    """For each form in which weights were sent: how to find the tensors in it. The newest form comes first.

    Attributes:
        source_weights: the weights that ``send()`` without an argument reads.
        source_tensors: finds the tensors of ``source_weights``, if that is a module that was sent before. Read directly
            by the sender: ``find`` would add two calls to the shortest update.
    """

    source_weights: object
    source_tensors: TensorTree | None = None
    _known: list[TensorFinder] = field(default_factory=list)

    def find(self, given: object) -> TensorTree | list[Tensor] | None:
        """Return the tensors of ``given`` (None: ``source_weights``), or a tree that finds them; None: a new form."""
        if given is None:
            given = self.source_weights
        for finder in self._known:
            found = finder.find(given)
            if found is not None:
                return found
        return None

    def add(self, given: object, finder: TensorFinder) -> None:
        """Keep the finder of ``given``; it replaces an older one."""
        given = self.source_weights if given is None else given
        others = [one for one in self._known if not one.takes(given)]
        self._known = [finder, *others][:_MAX_FINDERS]
        if given is self.source_weights and isinstance(finder, ModuleFinder):
            self.source_tensors = finder.find(given)
