"""Copying tensors into the views of one buffer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from wsync.loops.tensors import copy_all, is_like, is_plain


class PackPlan:
    """Copies lists of tensors into the views of one buffer, as bytes.

    Args:
        views: the views of one buffer; tied tensors are views of the same memory.
        shared: whether other processes read the buffer. The compiled class then writes past this core's caches.

    Attributes:
        views: as a tuple.
    """

    def __init__(self, views: Sequence[Tensor], shared: bool, /) -> None:
        self.views = tuple(views)
        self._plain = all(map(is_plain, self.views))
        leaders: dict[int, int] = {}
        self._leaders = [
            leaders.setdefault(view.data_ptr(), index) if view.numel() else index  # empty tensors share no memory
            for index, view in enumerate(self.views if self._plain else ())
        ]

    def fill(self, tensors: object, /) -> bool:
        """Copy a list of tensors into the views, one each.

        Returns:
            False, with nothing copied, if they are not as many as the views; if one is not plain bytes in main memory
            with its view's dtype, shape and strides; if tied views get tensors in different memory; or if the views
            are not in main memory.
        """
        if type(tensors) is not list or not self._plain or len(tensors) != len(self.views):
            return False
        if not all(map(is_like, tensors, self.views)):
            return False
        for index, leader in enumerate(self._leaders):
            if leader != index and tensors[index].data_ptr() != tensors[leader].data_ptr():
                return False
        leaders = [index for index, leader in enumerate(self._leaders) if leader == index]
        copy_all([self.views[index] for index in leaders], [tensors[index] for index in leaders])
        return True
