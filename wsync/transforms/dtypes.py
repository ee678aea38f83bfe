"""Other precisions: casts, and narrow numbers with scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from wsync.errors import LayoutMismatch
from wsync.transforms.chain import ByName, as_patterns, require_unused, shown_names
from wsync.weights.tensors import copy_all, tie_leaders

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
        super().__init__()
        self.dtype = _as_dtype(dtype)
        if not self.dtype.is_floating_point:
            raise ValueError(f"Cast is to a floating-point dtype, not to {self.dtype}; for integers see Quantize")
        self.only = as_patterns(only)

    def __repr__(self) -> str:
        return f"Cast({self.dtype})"

    def allocate(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return room for the converted weights; tied ones get one tensor."""
        narrow = _quantised(weights)
        kept = {*narrow, *(name + _SCALE for name in narrow)}
        floats = [name for name, tensor in weights.items() if tensor.is_floating_point() and name not in kept]
        matching = self.matching(self.only, floats, "floating-point weight")
        chosen = {name: weights[name] for name in floats if name in matching and weights[name].dtype is not self.dtype}
        made: list[Tensor] = []
        for index, (tensor, leader) in enumerate(zip(chosen.values(), tie_leaders(list(chosen.values())), strict=True)):
            made.append(torch.empty_like(tensor, dtype=self.dtype) if leader == index else made[leader])
        return dict(zip(chosen, made, strict=True))

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights, converted.

        Raises:
            LayoutMismatch: a pattern matches no weight of a whole model that can be converted.
        """
        buffers = self.buffers(weights)
        if buffers:
            copy_all(list(buffers.values()), [weights[name] for name in buffers])
        return {**weights, **buffers}


class Quantize(ByName):
    """Converts weights to a narrow dtype and a scale, for ``Dequantize`` (or an engine) at the other end.

    ``name`` becomes the quantised tensor, ``name + "_scale"`` its float32 scale: ``weight ≈ quantised × scale``, with
    ``scale = max|weight| / largest``. For int8 the error of each value is at most half its scale. Of tied weights each
    is quantised and sent.

    Args:
        dtype: ``torch.int8`` or ``torch.float8_e4m3fn``, or its name.
        per_channel: one scale for each index of the first dimension; otherwise one for the tensor.
        only: patterns of names; of those, the floating-point weights with two dimensions or more are converted.
    """

    def __init__(
        self, dtype: torch.dtype | str = torch.int8, *, per_channel: bool = True, only: str | Sequence[str] = "*"
    ) -> None:
        super().__init__()
        self.dtype = _as_dtype(dtype)
        if self.dtype not in _NARROW:
            raise ValueError(f"weights are quantised to int8 or float8_e4m3fn, not to {self.dtype}")
        self.per_channel = per_channel
        self.only = as_patterns(only)
        self._largest = 127.0 if self.dtype is torch.int8 else torch.finfo(self.dtype).max

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dtype}, per_channel={self.per_channel})"

    def allocate(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return room for the quantised weights and their scales."""
        wide = {name: one for name, one in weights.items() if one.is_floating_point() and one.dim() > 1 and one.numel()}
        chosen = self.matching(self.only, list(wide), "floating-point weight with two dimensions or more")
        require_unused([name + _SCALE for name in chosen], weights)
        found: dict[str, Tensor] = {}
        for name, tensor in wide.items():
            if name in chosen:
                channels = (tensor.shape[0], *(1,) * (tensor.dim() - 1)) if self.per_channel else ()
                found[name] = torch.empty(tensor.shape, dtype=self.dtype, device=tensor.device)
                found[name + _SCALE] = torch.empty(channels, dtype=torch.float32, device=tensor.device)
        return found

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights, quantised, with their scales.

        Raises:
            LayoutMismatch: a weight is infinite or not a number; the name of a scale is that of another weight; or a
                pattern matches no weight of a whole model that can be converted.
        """
        buffers = self.buffers(weights)
        with torch.no_grad():
            for name, quantised in buffers.items():
                if name in weights:  # else it is a scale
                    self._quantise(name, weights[name], quantised, buffers[name + _SCALE])
        return {**weights, **buffers}

    def _quantise(self, name: str, weight: Tensor, quantised: Tensor, scale: Tensor) -> None:
        wide = weight.detach().float()  # in half precision, scales and quotients would be rounded
        dimensions = tuple(range(1 if self.per_channel else 0, wide.dim()))
        torch.amax(wide.abs(), dimensions, keepdim=self.per_channel, out=scale)
        scale.div_(self._largest).clamp_(min=_LEAST_SCALE)  # at least that: of zeros alone
        if not scale.isfinite().all():
            raise LayoutMismatch(f"'{name}' has values that are infinite or not numbers, and cannot be quantised")
        scaled = wide / scale
        if self.dtype is torch.int8:
            scaled.round_()
        quantised.copy_(scaled.clamp_(-self._largest, self._largest))


class QuantizeInt8(Quantize):
    """``Quantize`` to int8, with the same options: a quarter of the bytes of float32."""

    def __init__(self, *, per_channel: bool = True, only: str | Sequence[str] = "*") -> None:
        super().__init__(torch.int8, per_channel=per_channel, only=only)


class Dequantize(ByName):
    """Multiplies each quantised weight by its scale: the opposite of ``Quantize``, for ``receive_transform``.

    Those are the weights in int8 or float8 for which there is a ``…_scale``. All others stay as they are.

    Args:
        dtype: the dtype of the result, or its name.
    """

    def __init__(self, dtype: torch.dtype | str = torch.float32) -> None:
        super().__init__()
        self.dtype = _as_dtype(dtype)

    def __repr__(self) -> str:
        return f"Dequantize({self.dtype})"

    def allocate(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return room for the results."""
        return {
            name: torch.empty(weights[name].shape, dtype=self.dtype, device=weights[name].device)
            for name in _quantised(weights)
        }

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights, without the scales.

        Raises:
            LayoutMismatch: no quantised weight has a scale.
        """
        buffers = self.buffers(weights)
        if not buffers:
            raise LayoutMismatch(f"no int8 or float8 weight has a scale ('…_scale'); there are {shown_names(weights)}")
        with torch.no_grad():
            for name, result in buffers.items():
                torch.mul(weights[name].float(), weights[name + _SCALE], out=result)
        scales = {name + _SCALE for name in buffers}
        return {**{name: tensor for name, tensor in weights.items() if name not in scales}, **buffers}


def _quantised(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the weights in a narrow dtype that have a scale beside them."""
    return [name for name, tensor in weights.items() if tensor.dtype in _NARROW and name + _SCALE in weights]


def _as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{dtype!r} is no dtype of torch, such as 'bfloat16'")
    return found
