"""Tensors that a transform writes its result into."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from wsync.loops.tensors import require_whole, tie_leaders


class Buffered(ABC):
    """A transform that writes into tensors of its own.

    They are reused while names, shapes, dtypes, devices and ties of the weights stay the same.
    """

    def __init__(self) -> None:
        self._like: list[tuple[str, torch.Size, torch.dtype, torch.device, int]] = []
        self._buffers: dict[str, Tensor] = {}

    def buffers(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors to write into for ``weights``.

        Raises:
            LayoutMismatch: some weights are sharded over ranks: PyTorch might then wait for the other ranks.
        """
        ties = tie_leaders(list(weights.values()))
        like = [
            (name, tensor.shape, tensor.dtype, tensor.device, leader)
            for (name, tensor), leader in zip(weights.items(), ties, strict=True)
        ]
        if like != self._like:
            require_whole(weights, weights.values())
            with torch.inference_mode(False):  # inference tensors could not be used in autograd later
                self._buffers = self.allocate(weights)
            self._like = like
        return self._buffers

    @abstractmethod
    def allocate(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return new tensors to write into, by name. Called by ``buffers``, once for weights of one kind."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the options, without the tensors."""
        return {**self.__dict__, "_like": [], "_buffers": {}}
