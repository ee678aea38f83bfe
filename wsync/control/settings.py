"""The sender's settings, which a worker gets in ``ACCEPTED``, ``LAYOUT`` and ``CHECK_LAYOUT``: plain JSON.

Every field is checked. The layout gives the positions of tensors in shared memory, so it is checked to stay within its
buffer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch

from wsync.errors import LayoutMismatch
from wsync.weights.layout import ALIGNMENT, Layout
from wsync.weights.tensor_file import check_dtypes

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).removeprefix("torch.").startswith(("qint", "quint"))
}
_LIMIT = 1 << 48  # largest valid number: bytes of a model, workers, connections


@dataclass(frozen=True, slots=True)
class SenderSettings:
    """How the sender will send weights to a worker.

    Attributes:
        layout: the layout of the weights (its fields: see ``Layout``); None until the sender has weights.
        checksum: which updates have a checksum, as the scheme's option says. True: all. None (by default): all that do
            not lie in the arena. False: only those by a ``TransportBackend``, which may deliver an older version: the
            checksum shows it.
        num_workers: the number of workers.
        connection_number: how many connections were accepted with this index, this one included; 0 where it is not
            used.
        arena_handle: where a process on the same machine finds the sender's arena of shared memory: the sender's
            process id, two descriptor numbers in the sender's process, and the arena's random name; None if the message
            carries the descriptors, or there is no arena.
        delta: whether versions may come as differences to those that the worker has acknowledged.
    """

    layout: Layout | None
    checksum: bool | None
    num_workers: int = 1
    connection_number: int = 0
    arena_handle: tuple[int, int, int, str] | None = None
    delta: bool = False

    def dump(self) -> bytes:
        """Return the settings as bytes."""
        layout = None if self.layout is None else _plain(self.layout)
        fields = [layout, self.checksum, self.num_workers, self.connection_number, self.arena_handle, self.delta]
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def load(cls, data: bytes) -> SenderSettings:
        """Parse the output of ``dump``.

        Raises:
            ValueError: ``data`` is malformed, or the layout exceeds its buffer; says why.
        """
        try:
            fields = json.loads(data)
        except RecursionError:
            raise ValueError("JSON nested too deeply") from None
        layout, checksum, num_workers, connection_number, arena_handle, delta = _list(fields, 6, "settings")
        if not isinstance(checksum, bool | None):
            raise ValueError("checksum must be a bool or null")
        if not isinstance(delta, bool):
            raise ValueError("delta must be a bool")
        return cls(
            None if layout is None else _layout(layout),
            checksum,
            _number(num_workers, 1, "num_workers"),
            _number(connection_number, 0, "connection_number"),
            None if arena_handle is None else _arena_handle(arena_handle),
            delta,
        )


def _arena_handle(data: Any) -> tuple[int, int, int, str]:
    pid, memory_fd, extra_fd, name = _list(data, 4, "the arena's handle")
    if not isinstance(name, str):
        raise ValueError("the arena's name must be a string")
    fds = _number(memory_fd, 0, "a descriptor"), _number(extra_fd, 0, "a descriptor")
    return _number(pid, 1, "a process id"), *fds, name


def layout_in(data: bytes) -> Layout:
    """Return the layout in dumped settings.

    Raises:
        ValueError: ``data`` is malformed, or has no layout.
    """
    layout = SenderSettings.load(data).layout
    if layout is None:
        raise ValueError("the settings have no layout")
    return layout


def dump_tensor_layout(layout: Layout, verb: str) -> str:
    """Return dumped settings with the layout alone, for weights that travel without a control connection.

    Args:
        layout: the layout of the weights.
        verb: a past participle for the error message, e.g. ``"stored"``.

    Raises:
        LayoutMismatch: there is extra state, which is pickled; or a dtype that safetensors files cannot have.
    """
    if layout.extra:
        raise LayoutMismatch(f"extra state cannot be {verb}: {', '.join(sorted(layout.extra))}")
    check_dtypes(layout)
    return SenderSettings(layout, checksum=True).dump().decode()


def _plain(layout: Layout) -> list[Any]:
    dtypes = [str(dtype).removeprefix("torch.") for dtype in layout.dtypes]
    extra = None if layout.extra is None else sorted(layout.extra)
    tensors = [layout.names, dtypes, layout.shapes, layout.strides, layout.offsets]
    # optional: entries that later weights may lack. model_may_have_more: whether the receiving model may have further
    # weights, which stay as they are.
    return [*tensors, layout.ties, layout.nbytes, extra, sorted(layout.optional), layout.model_may_have_more]


def _layout(data: Any) -> Layout:
    names, dtypes, shapes, strides, offsets, ties, nbytes, extra, optional, more = _list(data, 10, "a layout")
    if not isinstance(more, bool):
        raise ValueError("model_may_have_more must be a bool")
    names = _names(names)
    count = len(names)
    if not count:
        raise ValueError("a layout must have at least one tensor")
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
        model_may_have_more=more,
    )
    _check(layout)
    return layout


def _check(layout: Layout) -> None:
    """Check that every view lies inside the buffer, fills its range, and shares it only with tied tensors.

    The buffer must not be larger than its tensors need: a worker allocates memory of its size.
    """
    entries = list(zip(layout.shapes, layout.strides, layout.dtypes, layout.offsets, strict=True))
    ranges: list[tuple[int, int]] = []
    leader_of = dict(layout.ties)
    if len(leader_of) < len(layout.ties) or leader_of.keys() & set(leader_of.values()):
        raise ValueError("a tensor must not be tied twice, nor to a tied tensor")
    for index, (shape, strides, dtype, offset) in enumerate(entries):
        name = layout.names[index]
        if index in leader_of:
            if entries[leader_of[index]] != entries[index]:
                raise ValueError(f"'{name}' is tied to a tensor of another shape, strides, dtype or offset")
            continue
        if len(shape) > 64 or prod(max(size, 1) for size in shape) > _LIMIT or not _is_dense(shape, strides):
            raise ValueError(f"'{name}' has an invalid shape or strides: {list(shape)}, {list(strides)}")
        end = offset + prod(shape) * dtype.itemsize
        if offset % ALIGNMENT or end > layout.nbytes:
            raise ValueError(f"'{name}' is misaligned or outside the buffer: {offset} to {end} of {layout.nbytes}")
        if end > offset:
            ranges.append((offset, end))
    ranges.sort()
    if any(end > begin for (_, end), (begin, _) in pairwise(ranges)):
        raise ValueError("untied tensors must not overlap")
    used = sum(-(-(end - begin) // ALIGNMENT) * ALIGNMENT for begin, end in ranges)
    if layout.nbytes != max(used, ALIGNMENT):
        raise ValueError(f"the tensors take {used} bytes, and the buffer has {layout.nbytes}")


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements fill their memory without gap or overlap, in any order."""
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
        raise ValueError(f"{what}: must be a list{'' if length is None else f' of {length}'}")
    return value


def _number(value: Any, least: int, what: str) -> int:
    if type(value) is not int or not least <= value <= _LIMIT:  # not a bool
        raise ValueError(f"{what}: must be an integer from {least} to {_LIMIT}")
    return value


def _numbers(value: Any, what: str) -> tuple[int, ...]:
    return tuple(_number(item, 0, what) for item in _list(value, None, what))


def _names(value: Any) -> tuple[str, ...]:
    names = _list(value, None, "names")
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ValueError("names must be unique strings")
    return tuple(names)


def _dtype(value: Any) -> torch.dtype:
    if not isinstance(value, str) or value not in _DTYPES:
        raise ValueError("unknown dtype: another version of PyTorch?")
    return _DTYPES[value]


def _pair(value: Any, count: int) -> tuple[int, int]:
    follower, leader = _numbers(_list(value, 2, "a tie"), "a tie")
    if not leader < follower < count:
        raise ValueError("a tied tensor must refer to an earlier tensor")
    return follower, leader
