"""Other names, or fewer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from torch import Tensor

from wsync.errors import LayoutMismatch
from wsync.transforms.patterns import listing, matches, require


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
            raise LayoutMismatch(f"two weights get the same name: {listing(repeated)}")
        return renamed


class _ByName:
    """A transform that keeps a part of the weights, chosen by patterns of names."""

    selects = True

    def __init__(self, *patterns: str) -> None:
        self.patterns = patterns
        self._names: list[str] = []  # of the weights that were given last
        self._matching: list[str] = []  # of these

    def matching(self, weights: Mapping[str, Tensor]) -> list[str]:
        """Return the names that match; they are matched once for weights with the same names."""
        names = list(weights)
        if names != self._names:
            self._names, self._matching = names, [name for name in names if matches(name, self.patterns)]
        return self._matching

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.patterns))})"


class Select(_ByName):
    """Keeps the weights with matching names; the receiving model keeps its own values of all others.

    It also keeps the extra state of all its modules (``get_extra_state``).

    Args:
        patterns: of names: see ``wsync.transforms``.
    """

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights that match.

        Raises:
            LayoutMismatch: there are none.
        """
        kept = {name: weights[name] for name in self.matching(weights)}
        if not kept:
            raise LayoutMismatch(f"no weight matches; there are {listing(weights)}")
        return kept


class Exclude(_ByName):
    """Drops the weights with matching names; the receiving model keeps its own values of them.

    It also keeps the extra state of all its modules (``get_extra_state``).

    Args:
        patterns: of names: see ``wsync.transforms``.
    """

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights that do not match.

        Raises:
            LayoutMismatch: there are none.
        """
        dropped = {*self.matching(weights)}
        kept = {name: tensor for name, tensor in weights.items() if name not in dropped}
        if not kept:
            raise LayoutMismatch("every weight matches, so none is left to send")
        return kept
