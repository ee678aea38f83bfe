"""Patterns of weights' names: see ``wsync.transforms``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor

from wsync.errors import LayoutMismatch


class ByName:
    """A transform that is given names or patterns of weights.

    Attributes:
        takes_parts: whether it is given parts of a model, as in a partial update: a name or a pattern without a weight
            is then no error.
    """

    takes_parts = False

    def matching(
        self,
        patterns: Sequence[str],
        names: Sequence[str],
        *,
        kind: str = "weight",
        every_pattern_must_match: bool = True,
    ) -> set[str]:
        """Return those of ``names`` that match one of ``patterns``.

        Args:
            patterns: see ``wsync.transforms``.
            names: the names of weights of one kind.
            kind: the kind, for the error.
            every_pattern_must_match: see below.

        Raises:
            LayoutMismatch: a pattern other than ``*`` matches none of them, with ``every_pattern_must_match``, and
                unless the transform takes parts.
        """
        found = {pattern: [name for name in names if _matches(name, pattern)] for pattern in patterns}
        unused = [pattern for pattern, some in found.items() if not some and pattern != "*"]
        if unused and every_pattern_must_match and not self.takes_parts:
            raise LayoutMismatch(f"no {kind} matches {shown_names(unused)}; there are {shown_names(names)}")
        return set().union(*found.values())


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or (
        "." not in pattern and any(fnmatchcase(component, pattern) for component in name.split("."))
    )


def as_patterns(*given: str | Iterable[str]) -> tuple[str, ...]:
    """Return the patterns, each of which is given by itself or in a list.

    Raises:
        TypeError: one is not a string.
        ValueError: there is none.
    """
    found: list[object] = []
    for one in given:
        found += one if isinstance(one, Iterable) and not isinstance(one, str) else [one]
    patterns = [one for one in found if isinstance(one, str)]
    if len(patterns) < len(found):
        raise TypeError(f"patterns of names are strings, not {next(one for one in found if one not in patterns)!r}")
    if not patterns:
        raise ValueError("there is no pattern of names: give one or more, such as 'head' or 'layers.0.*'")
    return tuple(patterns)


def require(names: Mapping[str, object], weights: Mapping[str, Tensor]) -> None:
    """Raise ``LayoutMismatch`` unless ``weights`` have all ``names``."""
    missing = [name for name in names if name not in weights]
    if missing:
        raise LayoutMismatch(f"there is no {shown_names(missing)}; there are {shown_names(weights)}")


def require_distinct(names: Sequence[str]) -> None:
    """Raise ``LayoutMismatch`` if a name is given to two weights."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise LayoutMismatch(f"two weights get the same name: {shown_names(repeated)}")


def require_unused(names: Iterable[str], weights: Mapping[str, Tensor]) -> None:
    """Raise ``LayoutMismatch`` if one of ``names``, which a transform adds, is a weight's name already."""
    used = [name for name in names if name in weights]
    if used:
        raise LayoutMismatch(f"there is another weight named {shown_names(used)} already")


def shown_names(names: Mapping[str, object] | Sequence[str]) -> str:
    """Return the first names, as text."""
    shown = [f"'{name}'" for name in list(names)[:8]]
    return ", ".join(shown) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def stem_of(name: str, pattern: str) -> str | None:
    """Return what the ``*`` of ``pattern`` stands for in ``name``; None if it does not match."""
    before, star, after = pattern.partition("*")
    if not star:
        return "" if name == pattern else None
    if len(name) < len(before) + len(after) or not (name.startswith(before) and name.endswith(after)):
        return None
    return name[len(before) : len(name) - len(after)]


def checked_groups(groups: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return the groups of ``Fuse`` or ``Split``.

    Raises:
        ValueError: a group is empty; a name has more than one ``*``; or only some names of a group have one.
    """
    for one, several in groups.items():
        if not several:
            raise ValueError(f"the group of '{one}' is empty; it has at least one name")
        names = (one, *several)
        if len({"*" in name for name in names}) > 1:
            raise ValueError(f"in a group all names have a '*', or none has: not {shown_names(names)}")
        wrong = [name for name in names if name.count("*") > 1]
        if wrong:
            raise ValueError(
                f"a name in a group has at most one '*', which stands for any text: not {shown_names(wrong)}"
            )
    return {one: tuple(several) for one, several in groups.items()}


def expand(
    groups: Mapping[str, Sequence[str]], weights: Mapping[str, Tensor], *, part: bool
) -> Sequence[tuple[str, tuple[str, ...]]]:
    """Return the groups with their ``*`` replaced, once for each text that it stands for in names of ``weights``.

    Args:
        groups: those of ``Fuse``.
        weights: a model's, or (``part``) some of them: a group that matches nothing is then left out.
        part: see ``weights``.

    Raises:
        LayoutMismatch: a group matches nothing, or lacks one of its weights.
    """
    found: list[tuple[str, tuple[str, ...]]] = []
    for new, old in groups.items():
        stems = dict.fromkeys(stem for name in weights for one in old if (stem := stem_of(name, one)) is not None)
        if not (stems or part):
            raise LayoutMismatch(f"no weight matches {shown_names(old)}; there are {shown_names(weights)}")
        for stem in stems:
            members = tuple(one.replace("*", stem) for one in old)
            require(dict.fromkeys(members), weights)
            found.append((new.replace("*", stem), members))
    return found
