"""Tensors that a transform writes its result into."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Buffered(ABC):
    """A transform that writes into tensors of its own; they are reused while the weights are alike."""

    def __init__(self) -> None:
        self._like: list[tuple[str, torch.Size, torch.dtype, torch.device]] = []
        self._buffers: dict[str, Tensor] = {}

    def buffers(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors to write into for ``weights``."""
        like = [(name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in weights.items()]
        if like != self._like:
            with torch.inference_mode(False):  # autograd may meet them later
                self._buffers = self.allocate(weights)
            self._like = like
        return self._buffers

    @abstractmethod
    def allocate(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return new tensors to write into, by name. Called by ``buffers``, once for weights of one kind."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the options, without the tensors."""
        return {**self.__dict__, "_like": [], "_buffers": {}}


def memory_of(tensor: Tensor) -> object:
    """Equal for tied tensors."""
    if not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
