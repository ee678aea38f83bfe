"""Installing an update in a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wsync.loops.tensor_tree import TensorTree
from wsync.loops.tensors import copy_into_model


class Installer:
    """Installs updates in one model: parameters are bound (``p.data = view``) or copied, buffers are copied.

    Called inside the gate, by the acting thread or the receiver thread.

    Args:
        tree: finds the model's tensors.
        tensors: those that it found when the installer was made. The fast path of the compiled ``WorkerSlot`` uses the
            installer only while it finds the same, and if all copies are of plain bytes.
        bound: ``(parameter, index of its view)`` of the parameters that are bound.
        copied: the same, of the tensors that are copied.
    """

    def __init__(
        self,
        tree: TensorTree,
        tensors: tuple[Tensor, ...],
        bound: tuple[tuple[Tensor, int], ...],
        copied: tuple[tuple[Tensor, int], ...],
        /,
    ) -> None:
        self._bound = bound
        self._copied = copied

    def apply(self, views: Sequence[Tensor], /) -> None:
        """Install any tensors in the model as it was when the installer was made. PyTorch does the copies.

        Also clears the cache in which ``torch.autocast`` keeps casts of the old parameters. It belongs to the process:
        it is cleared even if this thread is in no autocast context, because another thread may be.

        Raises:
            ValueError: there are too few views.
            RuntimeError: from PyTorch, if a view does not fit its tensor.
        """
        if any(index >= len(views) for _, index in (*self._bound, *self._copied)):
            raise ValueError("fewer views than the model has tensors")
        if self._copied:
            copy_into_model([tensor for tensor, _ in self._copied], [views[index] for _, index in self._copied])
        for parameter, index in self._bound:
            parameter.data = views[index]
        torch.clear_autocast_cache()
