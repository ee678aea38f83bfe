"""Other precisions: casts, and narrow numbers with scales."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from wsync.errors import LayoutMismatch
from wsync.transforms.names import ByName, Memory, as_patterns, computed, matching, require_distinct, shown_names
from wsync.weights.tensors import tie_leaders

_NARROW = (torch.int8, torch.float8_e4m3fn)  # what ``Quantize`` converts to
_SCALE = "_scale"  # a quantised weight's name with this is its scale's
_LEAST_SCALE = torch.finfo(torch.float32).tiny


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
