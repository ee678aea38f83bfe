"""Another precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from wsync.loops.tensors import copy_all, tie_leaders
from wsync.transforms.buffers import Buffered
from wsync.transforms.patterns import ByName, as_patterns

NARROW = (torch.int8, torch.float8_e4m3fn)
"""What ``Quantize`` converts to."""
SCALE = "_scale"
"""A quantised weight's name with this is its scale's."""


class Cast(ByName, Buffered):
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
        self.dtype = as_dtype(dtype)
        if not self.dtype.is_floating_point:
            raise ValueError(f"Cast is to a floating-point dtype, not to {self.dtype}; for integers see Quantize")
        self.only = as_patterns(only)

    def __repr__(self) -> str:
        return f"Cast({self.dtype})"

    def allocate(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See ``Buffered``. Tied weights get one tensor."""
        narrow = quantised(weights)
        kept = {*narrow, *(name + SCALE for name in narrow)}
        floats = [name for name, tensor in weights.items() if tensor.is_floating_point() and name not in kept]
        matching = self.matching(self.only, floats, kind="floating-point weight")
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


def quantised(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the weights in a narrow dtype that have a scale beside them."""
    return [name for name, tensor in weights.items() if tensor.dtype in NARROW and name + SCALE in weights]


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return a dtype, or the one with this name."""
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{dtype!r} is no dtype of torch, such as 'bfloat16'")
    return found
