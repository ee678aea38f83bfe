"""Narrow integers or floats, with scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wsync.errors import LayoutMismatch
from wsync.loops.tensors import copy_all
from wsync.transforms.buffers import Buffered
from wsync.transforms.dtypes import NARROW, SCALE, as_dtype, quantised
from wsync.transforms.patterns import ByName, as_patterns, require_unused, shown_names
from wsync.transforms.pieces import Piece, grouped

_LEAST_SCALE = torch.finfo(torch.float32).tiny
_fused: Any = torch  # PyTorch's stubs do not export its functions of lists of tensors


class _Group(NamedTuple):
    """Pieces of weights that are quantised together, and where the results go."""

    pieces: Sequence[Piece]
    quantised: Sequence[Tensor]
    scales: Sequence[Tensor]


class Quantize(ByName, Buffered):
    """Converts weights to a narrow dtype and a scale, for ``Dequantize`` (or an engine) at the other end.

    ``name`` becomes the quantised tensor, ``name + SCALE`` its float32 scale: ``weight ≈ quantised × scale``, with
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
        if self.dtype not in NARROW:
            raise ValueError(f"weights are quantised to int8 or float8_e4m3fn, not to {self.dtype}")
        self.per_channel = per_channel
        self.only = as_patterns(only)
        self._groups: list[_Group] = []
        self._largest = 127.0 if self.dtype is torch.int8 else torch.finfo(self.dtype).max

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dtype}, per_channel={self.per_channel})"

    def allocate(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See ``Buffered``."""
        matrices = [
            name
            for name, tensor in weights.items()
            if tensor.is_floating_point() and tensor.dim() >= 2 and tensor.numel()
        ]
        matching = self.matching(self.only, matrices, kind="floating-point weight with two dimensions or more")
        chosen = {name: weights[name] for name in matrices if name in matching}
        require_unused([name + SCALE for name in chosen], weights)
        found: dict[str, Tensor] = {}
        for name, tensor in chosen.items():
            channels = (tensor.shape[0], *(1,) * (tensor.dim() - 1)) if self.per_channel else ()
            found[name] = torch.empty(tensor.shape, dtype=self.dtype, device=tensor.device)
            found[name + SCALE] = torch.empty(channels, dtype=torch.float32, device=tensor.device)
        self._groups = [
            _Group(
                pieces,
                [one.of(found[one.name]) for one in pieces],
                [one.of(found[one.name + SCALE]) for one in pieces],
            )
            for pieces in grouped(chosen, chosen if self.per_channel else ())
        ]
        return found

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights, quantised, with their scales.

        Raises:
            LayoutMismatch: a weight is infinite or not a number; the name of a scale is that of another weight; or a
                pattern matches no weight of a whole model that can be converted.
        """
        buffers = self.buffers(weights)
        with torch.no_grad():
            for group in self._groups:
                self._quantise(group, weights)
        return {**weights, **buffers}

    def _quantise(self, group: _Group, weights: Mapping[str, Tensor]) -> None:
        # in half precision, the scales and the quotients would be rounded
        wide = [one.of(weights[one.name].detach()).float() for one in group.pieces]
        for magnitude, scale in zip(_fused._foreach_abs(wide), group.scales, strict=True):
            dimensions = tuple(range(1 if self.per_channel else 0, magnitude.dim()))
            torch.amax(magnitude, dimensions, keepdim=self.per_channel, out=scale)
        _fused._foreach_div_(group.scales, self._largest)
        _fused._foreach_clamp_min_(group.scales, _LEAST_SCALE)  # of zeros alone
        if not torch.cat([scale.reshape(-1) for scale in group.scales]).isfinite().all():
            names = [
                one.name for one, scale in zip(group.pieces, group.scales, strict=True) if not scale.isfinite().all()
            ]
            raise LayoutMismatch(f"'{names[0]}' has values that are infinite or not numbers, and cannot be quantised")
        scaled = _fused._foreach_div(wide, group.scales)
        if self.dtype is torch.int8:
            _fused._foreach_round_(scaled)
        _fused._foreach_clamp_min_(scaled, -self._largest)
        _fused._foreach_clamp_max_(scaled, self._largest)
        copy_all(group.quantised, scaled)


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
        dtype: the dtype of the result, or its name.
    """

    def __init__(self, dtype: torch.dtype | str = torch.float32) -> None:
        super().__init__()
        self.dtype = as_dtype(dtype)
        self._groups: list[list[Piece]] = []

    def __repr__(self) -> str:
        return f"Dequantize({self.dtype})"

    def allocate(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See ``Buffered``."""
        names = quantised(weights)
        by_rows = [name for name in names if _has_scale_per_row(weights[name], weights[name + SCALE])]
        self._groups = grouped({name: weights[name] for name in names}, by_rows)
        return {name: torch.empty(weights[name].shape, dtype=self.dtype, device=weights[name].device) for name in names}

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights, without the scales.

        Raises:
            LayoutMismatch: no quantised weight has a scale.
        """
        buffers = self.buffers(weights)
        if not buffers:
            raise LayoutMismatch(f"no int8 or float8 weight has a scale ('…_scale'); there are {shown_names(weights)}")
        with torch.no_grad():
            for pieces in self._groups:
                results = [one.of(buffers[one.name]) for one in pieces]
                exact = self.dtype is torch.float32
                wide = results if exact else [torch.empty_like(one, dtype=torch.float32) for one in results]
                copy_all(wide, [one.of(weights[one.name]) for one in pieces])
                _fused._foreach_mul_(wide, [one.of(weights[one.name + SCALE]) for one in pieces])
                if not exact:
                    copy_all(results, wide)
        scales = {name + SCALE for name in buffers}
        return {**{name: tensor for name, tensor in weights.items() if name not in scales}, **buffers}


def _has_scale_per_row(weight: Tensor, scale: Tensor) -> bool:
    return weight.dim() >= 1 and scale.dim() == weight.dim() and scale.shape[0] == weight.shape[0]
