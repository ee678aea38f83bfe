"""Transforms in a row, and what those of the library have in common: patterns of names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from wsync.errors import LayoutMismatch
from wsync.transforms.delta import Delta
from wsync.weights.tensors import require_whole

Transform = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Weights by name → weights by name."""
Memory = dict[str, tuple[list[Any], Tensor]]
"""The results of the last call by name, and of what kind the weights were: new memory costs more than the copy."""


class ByName(ABC):
    """A transform of the library, which is given names or patterns. It keeps nothing of the weights itself.

    Attributes:
        selects: whether the result is a part of the model on purpose.
    """

    selects = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def __call__(
        self, weights: Mapping[str, Tensor], strict: bool = True, memory: Memory | None = None
    ) -> dict[str, Tensor]:
        """Return the transformed weights; LayoutMismatch: the transform does not fit them, or some are sharded.

        Args:
            weights: by name.
            strict: whether they are a whole model, so that a name or a pattern without a weight is an error.
            memory: of an earlier call, whose results are overwritten.
        """
        require_whole(weights, weights.values())  # PyTorch might wait for the other ranks
        with torch.no_grad():
            return self.apply(dict(weights), strict, {} if memory is None else memory)

    @abstractmethod
    def apply(self, weights: dict[str, Tensor], strict: bool, memory: Memory) -> dict[str, Tensor]:
        """Return the transformed weights."""


def computed(memory: Memory, name: str, inputs: Sequence[Tensor], compute: Callable[[Tensor | None], Tensor]) -> Tensor:
    """Return ``compute(out)``: the result for ``inputs``, in the memory of the last one of the same kind, if any."""
    kind = [(one.shape, one.dtype, one.device) for one in inputs]
    known = memory.get(name)
    result = compute(known[1] if known is not None and known[0] == kind else None)
    memory[name] = kind, result
    return result


class Chain:
    """Several transforms, one after the other; ``side`` is named in errors. Results are valid until the next call.

    Raises:
        TypeError: one is not callable.
    """

    def __init__(self, transforms: Transform | Sequence[Transform], side: str) -> None:
        self.transforms = _listed(transforms)
        self._side = side
        self._memories: list[Memory] = [{} for _ in self.transforms]
        for one in self.transforms:
            if not callable(one):
                raise TypeError(
                    f"{side} is a transform, such as wsync.transforms.Cast('bfloat16'), or a list, not {one!r}"
                )

    def __call__(self, weights: Mapping[str, Tensor], strict: bool = True) -> dict[str, Tensor]:
        """Return the transformed weights; ``strict`` as in the transforms of the library.

        Raises:
            LayoutMismatch: a transform does not fit the weights; names the side and the transform.
            TypeError: a transform returned something else than tensors by name.
        """
        with torch.inference_mode(False), torch.no_grad():
            for one, memory in zip(self.transforms, self._memories, strict=True):
                where = f"{self._side} {getattr(one, '__name__', None) or repr(one)}"
                try:
                    result = one(weights, strict, memory) if isinstance(one, ByName) else one(weights)
                except LayoutMismatch as error:
                    raise LayoutMismatch(f"{where}: {error}") from error
                except RuntimeError:  # PyTorch's, perhaps because of a DTensor
                    require_whole(weights, weights.values())
                    raise
                if not isinstance(result, Mapping):
                    raise TypeError(f"{where} returned a {type(result).__name__}, not a mapping")
                for name, tensor in result.items():
                    if not isinstance(name, str) or not isinstance(tensor, Tensor):
                        raise TypeError(f"{where} returned {name!r}: {type(tensor).__name__}")
                weights = result
        return dict(weights)

    @property
    def selects(self) -> bool:
        """Whether the result is a part of the model on purpose: the receiving model may have more."""
        return any(getattr(one, "selects", False) for one in self.transforms)


def compose(transforms: Transform | Sequence[Transform] | None, side: str) -> Chain | None:
    """Return transforms as a chain; None for none. ``Delta`` is left out: it changes no weights.

    ``side`` is ``"send_transform"`` or ``"receive_transform"``. TypeError: one is not callable. ValueError: a ``Delta``
    on the receiving side.
    """
    given = _listed(transforms)
    changing = [one for one in given if not isinstance(one, Delta)]
    if side != "send_transform" and len(changing) < len(given):
        raise ValueError(f"Delta() belongs in send_transform, not in {side}: workers read differences without it")
    return Chain(changing, side) if changing else None


def delta_of(transforms: Transform | Sequence[Transform] | None) -> Delta | None:
    """Return the ``Delta`` in a ``send_transform``; None if there is none. ValueError: it is not the last."""
    given = _listed(transforms)
    if any(isinstance(one, Delta) for one in given[:-1]):
        raise ValueError("Delta() is the last of send_transform, once: it encodes what the others return")
    return next((one for one in given[-1:] if isinstance(one, Delta)), None)


def _listed(transforms: Any) -> list[Any]:
    """Return the transforms one by one, also those of a ``Chain``."""
    if not isinstance(transforms, Sequence) or isinstance(transforms, str):
        transforms = [] if transforms is None else [transforms]
    return [each for one in transforms for each in (one.transforms if isinstance(one, Chain) else [one])]


# --- names ---


def matching(patterns: Sequence[str], names: Iterable[str], strict: bool, kind: str = "weight") -> set[str]:
    """Return those of ``names`` that match one of ``patterns``; ``kind`` says what they are, for the error.

    With ``strict``, a pattern that matches none is an error, except ``*``.
    """
    names = list(names)
    found = {pattern: [name for name in names if _matches(name, pattern)] for pattern in patterns}
    unused = [pattern for pattern, some in found.items() if not some and pattern != "*"]
    if unused and strict:
        raise LayoutMismatch(f"no {kind} matches {shown_names(unused)}; there are {shown_names(names)}")
    return set().union(*found.values())


@lru_cache(1 << 16)
def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or (
        "." not in pattern and any(fnmatchcase(component, pattern) for component in name.split("."))
    )


def as_patterns(*given: str | Iterable[str]) -> tuple[str, ...]:
    """Return patterns, given singly or in lists. TypeError: one is no string. ValueError: there is none."""
    found: list[Any] = []
    for one in given:
        found += one if isinstance(one, Iterable) and not isinstance(one, str) else [one]
    wrong = [one for one in found if not isinstance(one, str)]
    if wrong:
        raise TypeError(f"patterns of names are strings, not {wrong[0]!r}")
    if not found:
        raise ValueError("there is no pattern of names: give one or more, such as 'head' or 'layers.0.*'")
    return tuple(found)


def require(names: Iterable[str], weights: Mapping[str, Tensor]) -> None:
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
