"""Other names, or fewer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import ClassVar

from torch import Tensor

from wsync.errors import LayoutMismatch
from wsync.transforms.patterns import matches, require, shown_names


class Rename:
    """Renames weights.

    Args:
        names: ``{old: new}`` for those that change, or a function of the old name.
    """

    def __init__(self, names: Mapping[str, str] | Callable[[str], str]) -> None:
        self.names = dict(names) if isinstance(names, Mapping) else names

    def __repr__(self) -> str:
        return f"Rename({self.names!r})"

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``weights`` under their new names.

        Raises:
            LayoutMismatch: an old name is missing; or two weights get one name.
        """
        names = self.names
        if callable(names):
            new = [names(name) for name in weights]
        else:
            require(names, weights)
            new = [names.get(name, name) for name in weights]
        renamed = dict(zip(new, weights.values(), strict=True))
        if len(renamed) < len(weights):
            repeated = [name for name, count in Counter(new).items() if count > 1]
            raise LayoutMismatch(f"two weights get the same name: {shown_names(repeated)}")
        return renamed


class _ByName:
    """A transform that keeps a part of the weights, chosen by patterns of names."""

    selects = True
    _keeps_matching: ClassVar[bool]

    def __init__(self, *patterns: str) -> None:
        self.patterns = patterns
        self._names: list[str] = []  # of the weights that were given last
        self._matching = set[str]()  # of these

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights that are kept.

        Raises:
            LayoutMismatch: there are none.
        """
        names = list(weights)
        if names != self._names:  # they are matched once for weights with the same names
            self._names, self._matching = names, {name for name in names if matches(name, self.patterns)}
        kept = {name: one for name, one in weights.items() if (name in self._matching) is self._keeps_matching}
        if not kept:
            if self._keeps_matching:
                raise LayoutMismatch(f"no weight matches; there are {shown_names(weights)}")
            raise LayoutMismatch("every weight matches, so none is left to send")
        return kept

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.patterns))})"


class Select(_ByName):
    """Keeps the weights with matching names; the receiving model keeps its own values of all others.

    The receiving model keeps its own extra state (``get_extra_state``), too.

    Args:
        patterns: patterns of names: see ``wsync.transforms``.
    """

    _keeps_matching = True


class Exclude(_ByName):
    """Drops the weights with matching names; the receiving model keeps its own values of them.

    The receiving model keeps its own extra state (``get_extra_state``), too.

    Args:
        patterns: patterns of names: see ``wsync.transforms``.
    """

    _keeps_matching = False
