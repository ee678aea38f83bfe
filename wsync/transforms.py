"""Transforms: what is done to weights between a trainer and workers with models that differ from the trainer's.

A transform is a function ``Mapping[str, Tensor] → Mapping[str, Tensor]`` of weights by their dotted names. A scheme
applies ``send_transform`` in the trainer, before the weights are packed, so that the result is what travels; and
``receive_transform`` in the worker, before the weights are installed. A list of transforms is applied in order.

    fuse = Fuse({"*.qkv.weight": ["*.q.weight", "*.k.weight", "*.v.weight"]})
    scheme = SharedMemWeightSyncScheme(send_transform=[fuse, Cast("bfloat16")])

The transforms here keep nothing of the weights. A function of one's own may read what changes from version to version.
It may be called any number of times for one version, must not write into the tensors that it is given, and must be
picklable if it is a ``receive_transform``, which is also called with zeros, at ``connect``.

*Patterns* are those of ``fnmatch``. A pattern without a dot also matches one component of a name: ``lora_*`` matches
``layers.0.lora_A.weight``. A pattern that matches no weight of the model is an error at ``connect``, which lists
names that there are. A partial update (``send(…, partial=True)``) may lack names, and weights for patterns and groups.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from wsync.errors import LayoutMismatch, missing_extra
from wsync.weights.tensors import describe, require_whole, tie_leaders

__all__ = [
    "Cast",
    "Chain",
    "Delta",
    "Dequantize",
    "Exclude",
    "Fuse",
    "Quantize",
    "QuantizeInt8",
    "Rename",
    "Select",
    "Transform",
    "compose",
]

Transform = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Weights by name → weights by name."""
Memory = dict[tuple[object, ...], Tensor]
"""The results of a transform by name and form. The next call overwrites them: new memory costs more than the copy."""
_NARROW = (torch.int8, torch.float8_e4m3fn)  # what ``Quantize`` converts to
_SCALE = "_scale"  # a quantised weight's name with this is its scale's
_LEAST_SCALE = torch.finfo(torch.float32).tiny
_LARGEST_SHARE = 0.9  # a difference that is larger than this share of the weights is not used
_Bytes = bytes | bytearray | memoryview


class ByName(ABC):
    """A transform of the library, which is given names or patterns. It keeps nothing of the weights itself."""

    selects = False  # whether the result is a part of the model on purpose

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the transformed weights; LayoutMismatch: the transform does not fit them."""
        with torch.no_grad():
            return self.apply(dict(weights), True, {})

    @abstractmethod
    def apply(self, weights: dict[str, Tensor], strict: bool, memory: Memory) -> dict[str, Tensor]:
        """Return the transformed weights; ``weights`` may be changed.

        ``strict``: they are a whole model, so that a name or a pattern without a weight is an error.
        """


class Chain:
    """Several transforms, one after the other; ``side`` is named in errors. Results are valid until the next call.

    TypeError: one is not callable.
    """

    def __init__(self, transforms: Transform | Sequence[Transform], side: str) -> None:
        self.transforms = _listed(transforms)
        self._side = side
        self._memories: list[Memory] = [{} for _ in self.transforms]
        wrong = [one for one in self.transforms if not callable(one)]
        if wrong:
            raise TypeError(
                f"{side} is a transform, such as wsync.transforms.Cast('half'), or a list, not {wrong[0]!r}"
            )

    def __call__(self, weights: Mapping[str, Tensor], strict: bool = True) -> dict[str, Tensor]:
        """Return the transformed weights; ``strict``: they are a whole model.

        Raises:
            LayoutMismatch: a transform does not fit the weights, or some are sharded; names the side and the transform.
            TypeError: a transform returned something else than tensors by name.
        """
        result = dict(weights)
        with torch.inference_mode(False), torch.no_grad():
            for one, memory in zip(self.transforms, self._memories, strict=True):
                try:
                    if isinstance(one, ByName):
                        require_whole(result)  # PyTorch might wait for the other ranks
                        result = one.apply(result, strict, memory)
                    else:
                        result = self._checked(one, one(result))
                except LayoutMismatch as error:
                    raise LayoutMismatch(f"{self._where(one)}: {error}") from error
                except RuntimeError:  # PyTorch's, perhaps because of a DTensor
                    require_whole(result)
                    raise
        return result

    @property
    def selects(self) -> bool:
        """Whether the result is a part of the model on purpose: the receiving model may have more."""
        return any(getattr(one, "selects", False) for one in self.transforms)

    def _checked(self, transform: Transform, result: Any) -> dict[str, Tensor]:
        """Return what a user's function has returned, if it is tensors by name."""
        if not isinstance(result, Mapping):
            raise TypeError(f"{self._where(transform)} returned a {type(result).__name__}, not a mapping")
        for name, tensor in result.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise TypeError(f"{self._where(transform)} returned {name!r}: {type(tensor).__name__}")
        return dict(result)

    def _where(self, transform: Transform) -> str:
        return f"{self._side} {getattr(transform, '__name__', None) or repr(transform)}"


def _room(memory: Memory, name: str, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor like another one, in another dtype, to write the result called ``name`` into."""
    key = name, like.shape, like.device
    if key not in memory:
        memory[key] = torch.empty_like(like, dtype=dtype)
    return memory[key]


def compose(transforms: Transform | Sequence[Transform] | None, side: str) -> Chain | None:
    """Return transforms as a chain; None for none. ``Delta`` is left out: it changes no weights.

    ``side`` is the name of the option. TypeError: one is not callable. ValueError: a ``Delta`` on the receiving side.
    """
    changing = [one for one in _listed(transforms) if not isinstance(one, Delta)]
    if side != "send_transform" and delta_of(transforms) is not None:
        raise ValueError(f"Delta() belongs in send_transform, not in {side}: workers read differences without it")
    return Chain(changing, side) if changing else None


def delta_of(transforms: Transform | Sequence[Transform] | None) -> Delta | None:
    """Return the ``Delta`` in a ``send_transform``; None if there is none. ValueError: it is not the last."""
    given = _listed(transforms)
    found = [one for one in given if isinstance(one, Delta)]
    if found and found != given[-1:]:
        raise ValueError("Delta() is the last of send_transform, once: it encodes what the others return")
    return found[0] if found else None


def _listed(transforms: Any) -> list[Any]:
    """Return the transforms one by one, also those of a ``Chain``."""
    if not isinstance(transforms, Sequence) or isinstance(transforms, str):
        transforms = [] if transforms is None else [transforms]
    return [each for one in transforms for each in (one.transforms if isinstance(one, Chain) else [one])]


# --- names ---


def _matching(patterns: Sequence[str], names: Sequence[str], strict: bool, kind: str = "weight") -> set[str]:
    """Return those of ``names``, which are of some ``kind``, that match one of ``patterns``.

    With ``strict``, a pattern that matches none is an error, except ``*``.
    """
    if patterns == ("*",):
        return {*names}
    found = {pattern: [name for name in names if _matches(name, pattern)] for pattern in patterns}
    unused = [pattern for pattern, some in found.items() if not some and pattern != "*"]
    if unused and strict:
        raise LayoutMismatch(f"no {kind} matches {_shown(unused)}; there are {_shown(names)}")
    return set().union(*found.values())


@lru_cache(1 << 16)
def _matches(name: str, pattern: str) -> bool:
    components = [] if "." in pattern else name.split(".")
    return any(fnmatchcase(one, pattern) for one in (name, *components))


def _patterns(*given: str | Iterable[str]) -> tuple[str, ...]:
    """Return patterns, given singly or in lists. TypeError: one is no string. ValueError: there is none."""
    found = [one for some in given for one in ([some] if isinstance(some, str) else some)]
    if not all(isinstance(one, str) for one in found):
        raise TypeError(f"patterns of names are strings, not {found}")
    if not found:
        raise ValueError("there is no pattern of names: give one or more, such as 'head' or 'layers.0.*'")
    return tuple(found)


def _require_distinct(names: Iterable[str]) -> None:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise LayoutMismatch(f"two weights get the same name: {_shown(repeated)}")


def _require_all(names: Iterable[str], weights: Mapping[str, Tensor]) -> None:
    missing = [name for name in names if name not in weights]
    if missing:
        raise LayoutMismatch(f"there is no {_shown(missing)}; there are {_shown(weights)}")


def _shown(names: Iterable[str]) -> str:
    return describe([repr(name) for name in names])


class Rename(ByName):
    """Renames weights. An old name that is missing, and a new one that two weights get, are errors.

    ``names``: ``{old: new}`` for those that change, or a function of the old name.
    """

    def __init__(self, names: Mapping[str, str] | Callable[[str], str]) -> None:
        self.names = dict(names) if isinstance(names, Mapping) else names

    def apply(self, weights: dict[str, Tensor], strict: bool, memory: Memory) -> dict[str, Tensor]:
        names = self.names
        if strict and not callable(names):
            _require_all(names, weights)
        new = [names(name) if callable(names) else names.get(name, name) for name in weights]
        _require_distinct(new)
        return dict(zip(new, weights.values(), strict=True))


class Select(ByName):
    """Keeps the weights whose names match one of the patterns (strings, or lists of them).

    The receiving model keeps its own values of all others, and its own extra state (``get_extra_state``).
    """

    selects = True
    _drops: ClassVar[bool] = False  # what matches

    def __init__(self, *patterns: str | Sequence[str]) -> None:
        self.patterns = _patterns(*patterns)

    def apply(self, weights: dict[str, Tensor], strict: bool, memory: Memory) -> dict[str, Tensor]:
        found = _matching(self.patterns, list(weights), strict)
        kept = {name: one for name, one in weights.items() if (name in found) is not self._drops}
        if not kept:
            raise LayoutMismatch(f"none of these weights is left to send: {_shown(weights)}")
        return kept


class Exclude(Select):
    """Drops the weights that ``Select`` would keep. The receiving model may lack them."""

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
        for new, old in groups.items():
            stars = {name.count("*") for name in (new, *old)}
            if not old or len(stars) > 1 or max(stars) > 1:
                raise ValueError(
                    "a group has at least one name, and in all its names one '*', which stands for any text, or in "
                    f"none: not {{'{new}': {list(old)}}}"
                )
        self.groups = {new: tuple(old) for new, old in groups.items()}
        self.dim = dim

    def apply(self, weights: dict[str, Tensor], strict: bool, memory: Memory) -> dict[str, Tensor]:
        members: list[tuple[str, list[str]]] = []
        for new, old in self.groups.items():
            stems = _stems(weights, old)
            if strict and not stems:
                raise LayoutMismatch(f"no weight matches {_shown(old)}; there are {_shown(weights)}")
            members += [(new.replace("*", stem), [one.replace("*", stem) for one in old]) for stem in stems]
        parts = {one for _, old in members for one in old}
        _require_all(parts, weights)
        result = {name: tensor for name, tensor in weights.items() if name not in parts}
        _require_distinct([*result, *(new for new, _ in members)])
        for new, old in members:
            result[new] = self._joined(new, [weights[one] for one in old], memory)
        return result

    def _joined(self, name: str, parts: list[Tensor], memory: Memory) -> Tensor:
        key = name, *((one.shape, one.dtype, one.device) for one in parts)
        try:
            memory[key] = torch.cat(parts, self.dim, out=memory.get(key))
        except (RuntimeError, IndexError) as error:
            shapes = ", ".join(str(list(one.shape)) for one in parts)
            raise LayoutMismatch(
                f"'{name}' cannot be joined along dimension {self.dim}: the shapes of its parts are {shapes}"
            ) from error
        return memory[key]


def _stems(weights: Mapping[str, Tensor], patterns: Sequence[str]) -> list[str]:
    """Return what the ``*`` of one of ``patterns`` stands for in the names of weights; "" without a ``*``."""
    found = dict[str, None]()
    for pattern in patterns:
        form = re.compile(re.escape(pattern).replace(r"\*", "(.*)"), re.DOTALL)
        found |= {"".join(match.groups()): None for match in map(form.fullmatch, weights) if match}
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
        self.only = _patterns(only)

    def apply(self, weights: dict[str, Tensor], strict: bool, memory: Memory) -> dict[str, Tensor]:
        narrow = _quantised(weights)
        kept = {*narrow, *(name + _SCALE for name in narrow)}
        floats = [name for name, tensor in weights.items() if tensor.is_floating_point() and name not in kept]
        found = _matching(self.only, floats, strict, "floating-point weight")
        chosen = [name for name in floats if name in found and weights[name].dtype is not self.dtype]
        given = [weights[name] for name in chosen]
        leaders = tie_leaders(given)
        made = {i: _room(memory, chosen[i], given[i], self.dtype) for i in dict.fromkeys(leaders)}
        if made:
            torch._foreach_copy_([*made.values()], [given[i] for i in made])  # pyright: ignore[reportPrivateImportUsage]
        weights.update(zip(chosen, [made[i] for i in leaders], strict=True))
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
        self.only = _patterns(only)

    def apply(self, weights: dict[str, Tensor], strict: bool, memory: Memory) -> dict[str, Tensor]:
        wide = [name for name, one in weights.items() if one.is_floating_point() and one.dim() > 1 and one.numel()]
        found = _matching(self.only, wide, strict, "floating-point weight with two dimensions or more")
        chosen = [name for name in wide if name in found]
        _require_distinct([*weights, *(name + _SCALE for name in chosen)])
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
        return _room(memory, name, weight, self.dtype).copy_(scaled.clamp_(-largest, largest)), scale


QuantizeInt8 = partial(Quantize, torch.int8)
"""``Quantize`` to int8, with the same options: a quarter of the bytes of float32."""


class Dequantize(ByName):
    """Multiplies each quantised weight by its scale: the opposite of ``Quantize``, for ``receive_transform``.

    Those are the weights in int8 or float8 for which there is a ``…_scale``: it is an error if a whole model has none.
    All others stay as they are. ``dtype``: that of the result, or its name.
    """

    def __init__(self, dtype: torch.dtype | str = torch.float32) -> None:
        self.dtype = _as_dtype(dtype)

    def apply(self, weights: dict[str, Tensor], strict: bool, memory: Memory) -> dict[str, Tensor]:
        found = _quantised(weights)
        if strict and not found:
            raise LayoutMismatch(f"no int8 or float8 weight has a scale ('…_scale'); there are {_shown(weights)}")
        for name in found:
            wide = weights[name].float().mul_(weights.pop(name + _SCALE))
            weights[name] = _room(memory, name, weights[name], self.dtype).copy_(wide)
        return weights


def _quantised(weights: dict[str, Tensor]) -> list[str]:
    """Return the names of the weights in a narrow dtype that have a scale beside them."""
    return [name for name, tensor in weights.items() if tensor.dtype in _NARROW and name + _SCALE in weights]


def _as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{dtype!r} is no dtype of torch, such as 'bfloat16'")
    return found


# --- exact differences between two versions: one codec, for all media ---
#
# A difference is ``new XOR base`` of two packed versions: mostly zeros, and otherwise mostly the low bytes of numbers.
# So the bytes are grouped by their place within a number (first all lowest bytes, …) and compressed by zstd.
#
#     1 byte    bytes per number: 1, 2, 4 or 8
#     rest      a zstd frame of as many bytes as the packed weights have
#
# Which version is the base travels beside it.


class Delta:
    """Send only what has changed since the version that a worker has; at the end of ``send_transform``.

        DistributedWeightSyncScheme(send_transform=[Cast("bfloat16"), Delta()])

    A worker without the base gets the full weights, and so does every worker where the difference would not be smaller.
    Where nothing travels (shared memory), it has no effect. ImportError: the package ``zstandard`` is missing.
    """

    def __init__(self) -> None:
        require_zstandard()

    def __call__(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return weights

    def difference(self, old: _Bytes, new: _Bytes, width: int) -> bytes | None:
        """Return the difference of two packed versions; None if the full weights are hardly larger.

        ``width``: bytes per number, in most of the weights (``Layout.width``).
        """
        changed = np.frombuffer(old, np.uint64) ^ np.frombuffer(new, np.uint64)
        planes: Any = torch.from_numpy(changed.view(np.uint8)).view(-1, width).T.contiguous().numpy()
        content = require_zstandard().ZstdCompressor(level=1).compress(planes.data.cast("B"))
        return None if len(content) > _LARGEST_SHARE * len(new) else bytes([width]) + content


def apply_difference(base: _Bytes, payload: _Bytes, into: bytearray | memoryview) -> None:
    """Write the version that is ``payload`` away from ``base`` into ``into``, which may be ``base``.

    The caller compares the checksum. ValueError: it is malformed, or of another size; nothing was written.
    """
    zstandard, nbytes = require_zstandard(), len(base)
    frame, width = memoryview(payload)[1:], payload[0] if len(payload) else 0
    try:
        # Before memory is allocated for it.
        if width not in (1, 2, 4, 8) or zstandard.frame_content_size(frame) != nbytes:
            raise ValueError(f"the difference is not one of {nbytes} bytes")
        planes = np.empty((width, nbytes // width), np.uint8)
        with zstandard.ZstdDecompressor().stream_reader(frame) as reader:
            complete = reader.readinto(planes.reshape(-1).data) == nbytes
    except zstandard.ZstdError as error:
        raise ValueError(f"the difference is malformed: {error}") from error
    if not complete:
        raise ValueError("the difference is malformed: it ends too early")
    changed = torch.from_numpy(planes).T.contiguous().view(-1).numpy().view(np.uint64)
    np.bitwise_xor(np.frombuffer(base, np.uint64), changed, out=np.frombuffer(into, np.uint64))


def require_zstandard() -> ModuleType:
    """Return the package ``zstandard``; ImportError: it is missing."""
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise missing_extra(error, "delta") from error
    return zstandard
