"""Transforms in a row, and those of the library: other names, fewer weights, weights joined or split, precisions."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from wsync.errors import LayoutMismatch
from wsync.transforms.delta import Delta
from wsync.weights.tensors import require_whole, tie_leaders

Transform = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Weights by name → weights by name."""
Memory = dict[str, tuple[list[Any], Tensor]]
"""The results of the last call by name, and of what kind the weights were: new memory costs more than the copy."""
_NARROW = (torch.int8, torch.float8_e4m3fn)  # what ``Quantize`` converts to
_SCALE = "_scale"  # a quantised weight's name with this is its scale's
_LEAST_SCALE = torch.finfo(torch.float32).tiny


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
        """Return the transformed weights; ``weights`` may be changed."""


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


def matching(patterns: Sequence[str], names: Sequence[str], strict: bool, kind: str = "weight") -> set[str]:
    """Return those of ``names`` that match one of ``patterns``; ``kind`` says what they are, for the error.

    With ``strict``, a pattern that matches none is an error, except ``*``.
    """
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


def require_distinct(names: Iterable[str]) -> None:
    """Raise ``LayoutMismatch`` if a name is given to two weights."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise LayoutMismatch(f"two weights get the same name: {shown_names(repeated)}")


def shown_names(names: Mapping[str, object] | Sequence[str]) -> str:
    """Return the first names, as text."""
    shown = [f"'{name}'" for name in list(names)[:8]]
    return ", ".join(shown) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _require(names: Iterable[str], weights: Mapping[str, Tensor]) -> None:
    missing = [name for name in names if name not in weights]
    if missing:
        raise LayoutMismatch(f"there is no {shown_names(missing)}; there are {shown_names(weights)}")


class Rename(ByName):
    """Renames weights. An old name that is missing, and a new one that two weights get, are errors.

    Args:
        names: ``{old: new}`` for those that change, or a function of the old name.
    """

    def __init__(self, names: Mapping[str, str] | Callable[[str], str]) -> None:
        self.names = dict(names) if isinstance(names, Mapping) else names

    def apply(self, weights: dict[str, Tensor], strict: bool, memory: Memory) -> dict[str, Tensor]:
        names = self.names
        if strict and not callable(names):
            _require(names, weights)
        new = [names(name) if callable(names) else names.get(name, name) for name in weights]
        require_distinct(new)
        return dict(zip(new, weights.values(), strict=True))


class Select(ByName):
    """Keeps the weights whose names match one of the patterns (strings, or lists of them).

    The receiving model keeps its own values of all others, and its own extra state (``get_extra_state``).
    """

    selects = True
    _drops: ClassVar[bool] = False  # what matches

    def __init__(self, *patterns: str | Sequence[str]) -> None:
        self.patterns = as_patterns(*patterns)

    def apply(self, weights: dict[str, Tensor], strict: bool, memory: Memory) -> dict[str, Tensor]:
        found = matching(self.patterns, list(weights), strict)
        kept = {name: one for name, one in weights.items() if (name in found) is not self._drops}
        if not kept:
            raise LayoutMismatch(f"none of these weights is left to send: {shown_names(weights)}")
        return kept


class Exclude(Select):
    """Drops the weights whose names match one of the patterns (strings, or lists of them).

    The receiving model keeps its own values of them, or lacks them. It keeps its own extra state, too.
    """

    _drops = True


class Fuse(ByName):
    """Joins weights along a dimension: q, k and v to qkv, gate and up to gate_up.

    The joined weight is a new one: it is tied to no other, also where its parts are. A group that lacks some of its
    weights, shapes that do not go together, and another weight with the new name are errors.

    Args:
        groups: ``{new: [old, …]}``. A ``*`` in the names stands for the same text in all of them.
        dim: along which they are joined.

    Raises:
        ValueError: a group is empty; a name has more than one ``*``; or only some names of a group have one.
    """

    def __init__(self, groups: Mapping[str, Sequence[str]], dim: int = 0) -> None:
        self.groups = _checked_groups(groups)
        self.dim = dim

    def apply(self, weights: dict[str, Tensor], strict: bool, memory: Memory) -> dict[str, Tensor]:
        members: list[tuple[str, list[str]]] = []
        for new, old in self.groups.items():
            stems = _stems(weights, old, strict)
            members += [(new.replace("*", stem), [one.replace("*", stem) for one in old]) for stem in stems]
        parts = {one for _, old in members for one in old}
        _require(parts, weights)
        rest = {name: tensor for name, tensor in weights.items() if name not in parts}
        require_distinct([*rest, *(new for new, _ in members)])
        return {**rest, **{new: self._joined(new, [weights[one] for one in old], memory) for new, old in members}}

    def _joined(self, name: str, parts: list[Tensor], memory: Memory) -> Tensor:
        try:
            return computed(memory, name, parts, lambda out: torch.cat(parts, self.dim, out=out))
        except (RuntimeError, IndexError) as error:
            shapes = ", ".join(str(list(one.shape)) for one in parts)
            raise LayoutMismatch(
                f"'{name}' cannot be joined along dimension {self.dim}: the shapes of its parts are {shapes}"
            ) from error


class Split(ByName):
    """Takes joined weights apart, the opposite of ``Fuse``; copies nothing.

    Sizes that do not add up, a weight that two groups match, and another weight with the name of a part are errors.

    Args:
        groups: ``{old: [new, …]}``. A ``*`` in the names stands for the same text in all of them.
        sizes: the sizes of the parts along ``dim``; by default equal.
        dim: along which they were joined.

    Raises:
        ValueError: as in ``Fuse``.
    """

    def __init__(self, groups: Mapping[str, Sequence[str]], sizes: Sequence[int] | None = None, dim: int = 0) -> None:
        self.groups = _checked_groups(groups)
        self.sizes = None if sizes is None else tuple(sizes)
        self.dim = dim

    def apply(self, weights: dict[str, Tensor], strict: bool, memory: Memory) -> dict[str, Tensor]:
        result = dict(weights)
        for pattern, parts in self.groups.items():
            for stem in _stems(weights, [pattern], strict):
                name, names = pattern.replace("*", stem), [part.replace("*", stem) for part in parts]
                if result.get(name) is not weights[name]:
                    raise LayoutMismatch(f"two groups match '{name}'")
                views = self._split(name, result.pop(name), len(parts))
                require_distinct([*result, *names])
                result.update(zip(names, views, strict=True))
        return result

    def _split(self, name: str, joined: Tensor, count: int) -> Sequence[Tensor]:
        length = joined.shape[self.dim] if -joined.dim() <= self.dim < joined.dim() else 0
        sizes = self.sizes or (length // count,) * count
        if not length or len(sizes) != count or sum(sizes) != length:
            raise LayoutMismatch(
                f"'{name}' has length {length} along dimension {self.dim}, which is not the sum of {count} parts "
                f"of lengths {sizes}"
            )
        return joined.split(sizes, self.dim)


def _checked_groups(groups: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    for one, several in groups.items():
        stars = {name.count("*") for name in (one, *several)}
        if not several or len(stars) > 1 or max(stars) > 1:
            raise ValueError(
                "a group has at least one name, and in all its names one '*', which stands for any text, or in none: "
                f"not {{'{one}': {list(several)}}}"
            )
    return {one: tuple(several) for one, several in groups.items()}


def _stems(weights: Mapping[str, Tensor], patterns: Sequence[str], strict: bool) -> list[str]:
    """Return what the ``*`` of one of ``patterns`` stands for in the names of weights; "" without a ``*``."""
    found = dict[str, None]()
    for pattern in patterns:
        form = re.compile(re.escape(pattern).replace(r"\*", "(.*)"), re.DOTALL)
        found |= {"".join(match.groups()): None for match in map(form.fullmatch, weights) if match}
    if strict and not found:
        raise LayoutMismatch(f"no weight matches {shown_names(patterns)}; there are {shown_names(weights)}")
    return [*found]


# --- precisions ---


class Cast(ByName):
    """Converts floating-point weights to another dtype.

    Integers and booleans stay as they are, and so do weights that ``Quantize`` has converted, with their scales.

    Args:
        dtype: such as ``torch.bfloat16``, or its name (``"bfloat16"``).
        only: patterns of names; by default all weights.

    Raises:
        TypeError, ValueError: ``dtype`` is not a floating-point dtype; a pattern is not a string; or there is none.
    """

    def __init__(self, dtype: torch.dtype | str, only: str | Sequence[str] = "*") -> None:
        self.dtype = _as_dtype(dtype)
        if not self.dtype.is_floating_point:
            raise ValueError(f"Cast is to a floating-point dtype, not to {self.dtype}; for integers see Quantize")
        self.only = as_patterns(only)

    def apply(self, weights: dict[str, Tensor], strict: bool, memory: Memory) -> dict[str, Tensor]:
        narrow = _quantised(weights)
        kept = {*narrow, *(name + _SCALE for name in narrow)}
        floats = [name for name, tensor in weights.items() if tensor.is_floating_point() and name not in kept]
        found = matching(self.only, floats, strict, "floating-point weight")
        chosen = [name for name in floats if name in found and weights[name].dtype is not self.dtype]
        for name, leader in zip(chosen, tie_leaders([weights[name] for name in chosen]), strict=True):
            first = weights[chosen[leader]]
            if first.dtype is not self.dtype:
                first = computed(memory, name, [first], partial(_cast, first, self.dtype))
            weights[name] = first
        return weights


class Quantize(ByName):
    """Converts weights to a narrow dtype and a scale, for ``Dequantize`` (or an engine) at the other end.

    ``name`` becomes the quantised tensor, ``name + "_scale"`` its float32 scale: ``weight ≈ quantised × scale``, with
    ``scale = max|weight| / largest``. For int8 the error of each value is at most half its scale. Of tied weights each
    is quantised and sent. Values that are infinite or not numbers, and another weight with a scale's name, are errors.

    Args:
        dtype: ``torch.int8`` or ``torch.float8_e4m3fn``, or its name.
        per_channel: one scale for each index of the first dimension; otherwise one for the tensor.
        only: patterns of names; of those, the floating-point weights with two dimensions or more are converted.
    """

    def __init__(
        self, dtype: torch.dtype | str = torch.int8, *, per_channel: bool = True, only: str | Sequence[str] = "*"
    ) -> None:
        self.dtype = _as_dtype(dtype)
        if self.dtype not in _NARROW:
            raise ValueError(f"weights are quantised to int8 or float8_e4m3fn, not to {self.dtype}")
        self.per_channel = per_channel
        self.only = as_patterns(only)

    def apply(self, weights: dict[str, Tensor], strict: bool, memory: Memory) -> dict[str, Tensor]:
        wide = [name for name, one in weights.items() if one.is_floating_point() and one.dim() > 1 and one.numel()]
        found = matching(self.only, wide, strict, "floating-point weight with two dimensions or more")
        chosen = [name for name in wide if name in found]
        require_distinct([*weights, *(name + _SCALE for name in chosen)])
        for name in chosen:
            weights[name], weights[name + _SCALE] = self._quantised(name, weights[name], memory)
        return weights

    def _quantised(self, name: str, weight: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        largest = 127.0 if self.dtype is torch.int8 else torch.finfo(self.dtype).max
        wide = weight.float()  # in half precision, scales and quotients would be rounded
        dimensions = tuple(range(1 if self.per_channel else 0, wide.dim()))
        scale = wide.abs().amax(dimensions, keepdim=self.per_channel).div_(largest)
        scale.clamp_(min=_LEAST_SCALE)  # of zeros alone
        if not scale.isfinite().all():
            raise LayoutMismatch(f"'{name}' has values that are infinite or not numbers, and cannot be quantised")
        scaled = wide / scale
        if self.dtype is torch.int8:
            scaled.round_()
        scaled.clamp_(-largest, largest)
        return computed(memory, name, [weight], partial(_cast, scaled, self.dtype)), scale


QuantizeInt8 = partial(Quantize, torch.int8)
"""``Quantize`` to int8, with the same options: a quarter of the bytes of float32."""


class Dequantize(ByName):
    """Multiplies each quantised weight by its scale: the opposite of ``Quantize``, for ``receive_transform``.

    Those are the weights in int8 or float8 for which there is a ``…_scale``: it is an error if a whole model has none.
    All others stay as they are.

    Args:
        dtype: the dtype of the result, or its name.
    """

    def __init__(self, dtype: torch.dtype | str = torch.float32) -> None:
        self.dtype = _as_dtype(dtype)

    def apply(self, weights: dict[str, Tensor], strict: bool, memory: Memory) -> dict[str, Tensor]:
        found = _quantised(weights)
        if strict and not found:
            raise LayoutMismatch(f"no int8 or float8 weight has a scale ('…_scale'); there are {shown_names(weights)}")
        scales = {name + _SCALE for name in found}
        for name in found:
            wide = weights[name].float().mul_(weights[name + _SCALE])
            weights[name] = computed(memory, name, [weights[name]], partial(_cast, wide, self.dtype))
        return {name: tensor for name, tensor in weights.items() if name not in scales}


def _quantised(weights: dict[str, Tensor]) -> list[str]:
    """Return the names of the weights in a narrow dtype that have a scale beside them."""
    return [name for name, tensor in weights.items() if tensor.dtype in _NARROW and name + _SCALE in weights]


def _cast(given: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    return given.to(dtype) if out is None else out.copy_(given)


def _as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{dtype!r} is no dtype of torch, such as 'bfloat16'")
    return found
