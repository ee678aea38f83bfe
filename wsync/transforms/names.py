"""Other names, or fewer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from wsync.errors import LayoutMismatch
from wsync.transforms.patterns import ByName, as_patterns, require, require_distinct, shown_names


class Rename(ByName):
    """Renames weights.

    Args:
        names: ``{old: new}`` for those that change, or a function of the old name. The weights of a partial update
            may lack old names.
    """

    def __init__(self, names: Mapping[str, str] | Callable[[str], str]) -> None:
        self.names = dict(names) if isinstance(names, Mapping) else names

    def __repr__(self) -> str:
        return f"Rename({self.names!r})"

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``weights`` under their new names.

        Raises:
            LayoutMismatch: an old name is missing (from a whole model); or two weights get one name.
        """
        names = self.names
        if callable(names):
            new = [names(name) for name in weights]
        else:
            if not self.takes_parts:
                require(names, weights)
            new = [names.get(name, name) for name in weights]
        require_distinct(new)
        return dict(zip(new, weights.values(), strict=True))


class _Filter(ByName):
    """A transform that keeps a part of the weights, chosen by patterns of names."""

    selects = True
    _keeps_matching: ClassVar[bool]

    def __init__(self, *patterns: str | Sequence[str]) -> None:
        self.patterns = as_patterns(*patterns)
        self._names: list[str] = []  # of the weights that were given last
        self._matching = set[str]()  # of these

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights that are kept.

        Raises:
            LayoutMismatch: there are none; or a pattern matches none of the first weights, which are a whole model.
        """
        names = list(weights)
        if names != self._names:  # they are matched once for weights with the same names
            # Later weights may lack what is dropped: a state dict has no non-persistent buffers.
            self._matching = self.matching(self.patterns, names, every_pattern_must_match=not self._names)
            self._names = names
        kept = {name: one for name, one in weights.items() if (name in self._matching) is self._keeps_matching}
        if not kept:
            if self._keeps_matching:
                raise LayoutMismatch(f"no weight matches; there are {shown_names(weights)}")
            raise LayoutMismatch("every weight matches, so none is left to send")
        return kept

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.patterns))})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the options, without names of weights: a copy is for other weights."""
        return {**self.__dict__, "_names": [], "_matching": set()}


class Select(_Filter):
    """Keeps the weights with matching names; the receiving model keeps its own values of all others.

    The receiving model keeps its own extra state (``get_extra_state``), too.

    Args:
        patterns: patterns of names, or lists of them: see ``wsync.transforms``.

    Raises:
        TypeError, ValueError: a pattern is not a string; or there is none.
    """

    _keeps_matching = True


class Exclude(_Filter):
    """Drops the weights with matching names; the receiving model keeps its own values of them, or lacks them.

    The receiving model keeps its own extra state (``get_extra_state``), too.

    Args:
        patterns: patterns of names, or lists of them: see ``wsync.transforms``.

    Raises:
        TypeError, ValueError: a pattern is not a string; or there is none.
    """

    _keeps_matching = False
