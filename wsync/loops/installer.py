"""Switching a model to an update."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor

from wsync.loops.tensor_tree import TensorTree
from wsync.loops.tensors import copy_all, is_like


class Installer:
    """Switches a model to views of an update. Parameters are bound (``p.data = view``) or copied, buffers are copied.

    Args:
        tree: finds the model's tensors.
        tensors: those that it found when the installer was made.
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
        self._tree = tree
        self._tensors = tensors
        self._bound = bound
        self._copied = copied

    def install(self, views: Sequence[Tensor], /) -> bool:
        """Switch to the views of an arena's slot if that is a usual case.

        Args:
            views: a tuple; each fills its memory without a gap.

        Returns:
            False, if the model is not what it was when the installer was made, or a tensor has another dtype than its
            view, is not plain bytes in main memory, or refused the new value. The model may have been changed in part
            then: the caller goes on with ``apply``, or with another installer.
        """
        if not self.fits(views):
            return False
        try:
            self.apply(views)
        except Exception:  # noqa: BLE001  apply() meets the same error, where it is reported
            return False
        return True

    def fits(self, views: Sequence[Tensor]) -> bool:
        """Whether the model is what it was, and takes ``views`` as plain bytes."""
        now = self._tree.tensors()
        return (
            type(views) is tuple
            and all(index < len(views) for _, index in (*self._bound, *self._copied))
            and now is not None
            and len(now) == len(self._tensors)
            and all(map(is_, now, self._tensors))
            and all(tensor.is_cpu and tensor.dtype is views[index].dtype for tensor, index in self._bound)
            and all(is_like(tensor, views[index]) for tensor, index in self._copied)
        )

    def apply(self, views: Sequence[Tensor], /) -> None:
        """Switch to any tensors, whatever has become of the model. PyTorch copies what is copied.

        Also drops the casts of old parameters that ``torch.autocast`` keeps until its context ends. They are the
        process's, and another thread may be inside such a context, so this does not ask.

        Raises:
            ValueError: there are too few views.
            RuntimeError: from PyTorch, if a view does not fit its tensor.
        """
        if any(index >= len(views) for _, index in (*self._bound, *self._copied)):
            raise ValueError("fewer views than the model has tensors")
        if self._copied:
            copy_all([tensor for tensor, _ in self._copied], [views[index] for _, index in self._copied])
        for parameter, index in self._bound:
            parameter.data = views[index]
        torch.clear_autocast_cache()
