"""A multi-layer perceptron that is quick where it is small: on a CPU, in thousands of calls a second."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

_BY_NUMPY = (torch.float32, torch.float64)
_SMALL = 1 << 16  # elements; torch shares more among its threads


class MLP(nn.Module):
    """Linear layers with activations between: ``[*B, sizes[0]]`` to ``[*B, sizes[-1]]``.

    One module and not a ``Sequential`` of them: for 64 rows of a width of 64, modules that call modules take an eighth
    of the time. Weights are orthogonal at first (https://arxiv.org/abs/1312.6120), with a gain of the square root of 2,
    and biases 0.

    Args:
        sizes: of what goes in, of the hidden layers, of what comes out.
        activation: one of ``tanh``, ``relu``, ``elu``, ``silu``.
        last_gain: of the last layer's weight.

    Raises:
        ValueError: an unknown `activation`.
    """

    def __init__(self, sizes: Sequence[int], activation: str = "tanh", last_gain: float = 1.0) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}: one of {', '.join(ACTIVATIONS)}")
        self._activation = ACTIVATIONS[activation]
        self._layers = [(f"weight_{i}", f"bias_{i}") for i in range(len(sizes) - 1)]
        gains = [math.sqrt(2.0)] * (len(sizes) - 2) + [last_gain]
        for (weight, bias), (fan_in, fan_out), gain in zip(self._layers, pairwise(sizes), gains, strict=True):
            self.register_parameter(weight, nn.Parameter(nn.init.orthogonal_(torch.empty(fan_out, fan_in), gain)))
            self.register_parameter(bias, nn.Parameter(torch.zeros(fan_out)))

    def forward(self, input: Tensor) -> Tensor:
        """Return what the layers make of each row of `input`."""
        own: dict[str, Any] = self._parameters  # attributes of a module take as long as a small product
        activation = self._activation
        *hidden, (weight, bias) = self._layers
        for name, other in hidden:
            input = activation(functional.linear(input, own[name], own[other]))
        return functional.linear(input, own[weight], own[bias])


def _tanh(fresh: Tensor) -> Tensor:
    """Return the tanh of a tensor that nobody else has: it may be overwritten.

    By numpy, in a sixth of the time that torch's takes on an AMD EPYC: that is MKL's, whose kernel there is the one for
    any processor. It was a tenth of a collector's time, and an eighth of a gradient step's forward and backward.
    """
    small = fresh.is_cpu and fresh.dtype in _BY_NUMPY and fresh.numel() <= _SMALL
    if not small or type(fresh) is not Tensor or _is_followed():
        return torch.tanh(fresh)
    if fresh.requires_grad:
        return _Tanh.apply(fresh)  # pyright: ignore[reportReturnType]
    content = fresh.numpy()
    np.tanh(content, out=content)
    return fresh


def _is_followed() -> bool:
    """Whether somebody follows what torch does: a tracer, a compiler, a transform such as ``torch.vmap``."""
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    traced = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    return transformed or traced or torch.compiler.is_compiling()


class _Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        output = torch.from_numpy(np.tanh(input.numpy()))
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,), (output,) = gradients, ctx.saved_tensors
        return torch.ops.aten.tanh_backward(gradient, output)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": _tanh,
    "relu": torch.relu,
    "elu": functional.elu,
    "silu": functional.silu,
}
