"""Transforms in a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wsync.errors import LayoutMismatch
from wsync.transforms.delta import Delta
from wsync.transforms.names import ByName, Memory
from wsync.weights.tensors import require_whole

Transform = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Weights by name → weights by name."""


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
