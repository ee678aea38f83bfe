"""What a worker is told before any weights come, as plain JSON: nothing in it is executed, everything is checked.

Tensors are made over foreign memory by a layout, so one that came from outside must not point beyond its buffer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch

from wsync.weights.layout import ALIGNMENT, Layout

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).removeprefix("torch.").startswith(("qint", "quint"))
}
_MOST = 1 << 48  # bytes of a model, workers, generations


@dataclass(frozen=True, slots=True)
class Plan:
    """How a sender will send.

    Attributes:
        layout: of the weights; None until the sender knows.
        checksum: whether each update has one; None: if it crosses a network.
        workers: how many there can be.
        generation: how many have joined in this worker's place, this one included.
    """

    layout: Layout | None
    checksum: bool | None
    workers: int = 1
    generation: int = 0

    def dump(self) -> bytes:
        """As bytes."""
        layout = None if self.layout is None else _plain(self.layout)
        return json.dumps([layout, self.checksum, self.workers, self.generation], separators=(",", ":")).encode()

    @classmethod
    def load(cls, data: bytes) -> Plan:
        """What was dumped.

        Raises:
            ValueError: it is no plan, or one that would reach beyond its buffer; says why.
        """
        layout, checksum, workers, generation = _list(_parse(data), 4, "a plan")
        if not isinstance(checksum, bool | None):
            raise ValueError("a plan says whether there are checksums")
        return cls(
            None if layout is None else _layout(layout),
            checksum,
            _number(workers, 1, "workers"),
            _number(generation, 0, "generation"),
        )


def proposed(data: bytes) -> Layout:
    """The layout that a plan proposes.

    Raises:
        ValueError: it is no plan, or proposes nothing.
    """
    layout = Plan.load(data).layout
    if layout is None:
        raise ValueError("a proposal has a layout")
    return layout


def _plain(layout: Layout) -> list[Any]:
    dtypes = [str(dtype).removeprefix("torch.") for dtype in layout.dtypes]
    extra = None if layout.extra is None else sorted(layout.extra)
    tensors = [layout.names, dtypes, layout.shapes, layout.strides, layout.offsets]
    return [*tensors, layout.ties, layout.nbytes, extra, sorted(layout.optional)]


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("a plan is not nested so deep") from None


def _layout(data: Any) -> Layout:
    names, dtypes, shapes, strides, offsets, ties, nbytes, extra, optional = _list(data, 9, "a layout")
    names = _names(names)
    count = len(names)
    if not count:
        raise ValueError("a layout without any tensor")
    layout = Layout(
        names=names,
        shapes=tuple(torch.Size(_numbers(shape, "a shape")) for shape in _list(shapes, count, "shapes")),
        strides=tuple(_numbers(stride, "strides") for stride in _list(strides, count, "strides")),
        dtypes=tuple(_dtype(dtype) for dtype in _list(dtypes, count, "dtypes")),
        offsets=_numbers(_list(offsets, count, "offsets"), "offsets"),
        ties=tuple(_pair(tie, count) for tie in _list(ties, None, "ties")),
        nbytes=_number(nbytes, ALIGNMENT, "bytes"),
        extra=None if extra is None else frozenset(_names(extra)),
        optional=frozenset(_names(optional)),
    )
    _check(layout)
    return layout


def _check(layout: Layout) -> None:
    """See that every view lies inside the buffer, fills its place, and shares it with those that it is tied to only."""
    entries = list(zip(layout.shapes, layout.strides, layout.dtypes, layout.offsets, strict=True))
    places: list[tuple[int, int]] = []
    leaders = dict(layout.ties)
    if len(leaders) < len(layout.ties) or leaders.keys() & set(leaders.values()):
        raise ValueError("a tensor is tied twice")
    for index, (shape, strides, dtype, offset) in enumerate(entries):
        name = layout.names[index]
        if index in leaders:
            if entries[leaders[index]] != entries[index]:
                raise ValueError(f"'{name}' is tied to a tensor that is not like it")
            continue
        if len(shape) > 64 or prod(max(size, 1) for size in shape) > _MOST or not _is_dense(shape, strides):
            raise ValueError(f"'{name}' has impossible shape or strides: {list(shape)}, {list(strides)}")
        end = offset + prod(shape) * dtype.itemsize
        if offset % ALIGNMENT or end > layout.nbytes:
            raise ValueError(f"'{name}' lies at {offset} to {end} of {layout.nbytes} bytes")
        if end > offset:
            places.append((offset, end))
    places.sort()
    if any(end > begin for (_, end), (begin, _) in pairwise(places)):
        raise ValueError("two tensors lie in one place")


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements fill their memory without gap or overlap, in whichever order."""
    if len(shape) != len(strides):
        return False
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected and prod(shape):
            return False
        expected *= size
    return True


def _list(value: Any, length: int | None, what: str) -> list[Any]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise ValueError(f"{what}: a list{'' if length is None else f' of {length}'} was expected")
    return value


def _number(value: Any, least: int, what: str) -> int:
    if type(value) is not int or not least <= value <= _MOST:  # not a bool
        raise ValueError(f"{what}: not a number from {least} to {_MOST}")
    return value


def _numbers(value: Any, what: str) -> tuple[int, ...]:
    return tuple(_number(item, 0, what) for item in _list(value, None, what))


def _names(value: Any) -> tuple[str, ...]:
    names = _list(value, None, "names")
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ValueError("names are different strings")
    return tuple(names)


def _dtype(value: Any) -> torch.dtype:
    if not isinstance(value, str) or value not in _DTYPES:
        raise ValueError("there is no such dtype here: another version of PyTorch?")
    return _DTYPES[value]


def _pair(value: Any, count: int) -> tuple[int, int]:
    follower, leader = _numbers(_list(value, 2, "a tie"), "a tie")
    if not leader < follower < count:
        raise ValueError("a tie is of a tensor to one before it")
    return follower, leader
