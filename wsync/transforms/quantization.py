"""Narrow integers or floats, with scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from wsync.errors import LayoutMismatch
from wsync.transforms.buffers import Buffered
from wsync.transforms.dtypes import as_dtype
from wsync.transforms.patterns import listing, matches, require_unused

_NARROW = (torch.int8, torch.float8_e4m3fn)


class Quantize(Buffered):
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
        self.dtype = as_dtype(dtype)
        if self.dtype not in _NARROW:
            raise ValueError(f"weights are quantised to int8 or float8_e4m3fn, not to {self.dtype}")
        self.per_channel = per_channel
        self.only = (only,) if isinstance(only, str) else tuple(only)
        self._largest = 127.0 if self.dtype is torch.int8 else torch.finfo(self.dtype).max

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dtype}, per_channel={self.per_channel})"

    def allocate(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See ``Buffered``."""
        found: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            if tensor.is_floating_point() and tensor.dim() >= 2 and matches(name, self.only):
                channels = (tensor.shape[0], *(1,) * (tensor.dim() - 1)) if self.per_channel else ()
                found[name] = torch.empty(tensor.shape, dtype=self.dtype, device=tensor.device)
                require_unused([name + "_scale"], weights)
                found[name + "_scale"] = torch.empty(channels, dtype=torch.float32, device=tensor.device)
        return found

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights, quantised, with their scales.

        Raises:
            LayoutMismatch: a weight is infinite or not a number; or the name of a scale is that of another weight.
        """
        buffers = self.buffers(weights)
        for name, tensor in weights.items():
            quantised = buffers.get(name)
            if quantised is None:
                continue
            scale = buffers[name + "_scale"]
            wide = tensor.detach().float()  # in half precision, the scale and the quotients would be rounded
            magnitude = wide.abs()
            largest = (
                magnitude.amax(tuple(range(1, tensor.dim())), keepdim=True) if self.per_channel else magnitude.max()
            )
            torch.div(largest, self._largest, out=scale)
            if not torch.isfinite(scale).all():
                raise LayoutMismatch(f"'{name}' has values that are infinite or not numbers, and cannot be quantised")
            scaled = wide / scale.masked_fill(scale == 0, 1.0)
            if self.dtype is torch.int8:
                scaled.round_()
            quantised.copy_(scaled.clamp_(-self._largest, self._largest))
        return {**weights, **buffers}


class QuantizeInt8(Quantize):
    """``Quantize`` to int8: a quarter of the bytes of float32.

    Args:
        per_channel: see ``Quantize``.
        only: see ``Quantize``.
    """

    def __init__(self, *, per_channel: bool = True, only: str | Sequence[str] = "*") -> None:
        super().__init__(torch.int8, per_channel=per_channel, only=only)


class Dequantize(Buffered):
    """Multiplies each quantised weight by its scale: the opposite of ``Quantize``, for ``receive_transform``.

    Those are the weights in int8 or float8 for which there is a ``…_scale``. All others stay as they are.

    Args:
        dtype: of the result, or its name.
    """

    def __init__(self, dtype: torch.dtype | str = torch.float32) -> None:
        super().__init__()
        self.dtype = as_dtype(dtype)

    def __repr__(self) -> str:
        return f"Dequantize({self.dtype})"

    def allocate(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See ``Buffered``."""
        names = [name for name, tensor in weights.items() if tensor.dtype in _NARROW and name + "_scale" in weights]
        return {name: torch.empty(weights[name].shape, dtype=self.dtype, device=weights[name].device) for name in names}

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights, without the scales.

        Raises:
            LayoutMismatch: no quantised weight has a scale.
        """
        buffers = self.buffers(weights)
        if not buffers:
            raise LayoutMismatch(f"no int8 or float8 weight has a scale ('…_scale'); there are {listing(weights)}")
        for name, result in buffers.items():
            torch.mul(weights[name].to(torch.float32), weights[name + "_scale"], out=result)
        scales = {name + "_scale" for name in buffers}
        return {**{name: tensor for name, tensor in weights.items() if name not in scales}, **buffers}
