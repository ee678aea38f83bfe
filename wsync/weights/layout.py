"""The flat plan of one model's weights, computed once, and buffers: memory for one version of them, packed by it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

import msgspec
import torch
from torch import Tensor

from wsync.errors import LayoutMismatch
from wsync.native import native
from wsync.weights.snapshot import Snapshot, snapshot
from wsync.weights.tensors import copy_all, describe, require_apart, require_carried, same_bits, tie_leaders, zeros

_SHOWN = 8  # names in a remedy
ALIGNMENT = 64  # bytes: a cache line, and more than any dtype needs
_POOL_ALONE = 2  # references: the pool's list, and the argument of ``getrefcount``


class Layout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True):
    """Name, dtype, shape, strides and place of every tensor of a model, in one flat buffer of bytes.

    Entries are ordered by dtype, the widest first: each is one contiguous stretch, as in a file. Ties share a place.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]  # in elements
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]  # in bytes
    ties: tuple[tuple[int, int], ...]  # pairs ``(follower, leader)`` of entries that are one tensor
    nbytes: int  # of the flat buffer
    extra: frozenset[str] | None  # names of the modules' extra states; None where the first weights could not say
    model_may_have_more: bool  # whether a receiving model may have more weights, which then keep their values

    @classmethod
    def of(cls, weights: Snapshot) -> Layout:
        """Return the plan of ``weights``; LayoutMismatch: they cannot be carried, or there are none."""
        names = sorted(own := weights.tensors, key=lambda name: (-own[name].itemsize, str(own[name].dtype)))
        if not names:
            raise LayoutMismatch("these weights are empty: no parameter and no buffer")
        tensors = [weights.tensors[name] for name in names]
        require_carried(names, tensors)
        require_apart(weights.tensors, "these weights")
        offsets: list[int] = []
        ties: list[tuple[int, int]] = []
        end = 0
        for index, (tensor, leader) in enumerate(zip(tensors, tie_leaders(tensors), strict=True)):
            if leader != index:
                ties.append((index, leader))
                offsets.append(offsets[leader])
                continue
            offsets.append(end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return cls(
            names=tuple(names),
            shapes=tuple(tuple(tensor.shape) for tensor in tensors),
            strides=tuple(_strides(tensor.shape, tensor.stride()) for tensor in tensors),
            dtypes=tuple(tensor.dtype for tensor in tensors),
            offsets=tuple(offsets),
            ties=tuple(ties),
            nbytes=max(end, ALIGNMENT),
            extra=None if weights.extra is None else frozenset(weights.extra),
            model_may_have_more=weights.model_may_have_more,
        )

    def encode(self) -> bytes:
        """Return the layout as plain data (msgpack). Equal layouts give equal bytes."""
        return msgspec.msgpack.encode(self, enc_hook=_plain, order="deterministic")

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Layout:
        """Return the layout that ``encode`` gave; ValueError: it is malformed, or does not fit its buffer."""
        new = msgspec.msgpack.decode(data, type=cls, dec_hook=lambda _, plain: getattr(torch, plain, None))
        columns, count = (new.names, new.shapes, new.strides, new.dtypes, new.offsets), len(new.names)
        malformed = ValueError("a layout that was received is malformed")
        if not count or {len(column) for column in columns} != {count} or len({*new.names}) != count:
            raise malformed
        if not all(0 <= leader < index < count for index, leader in new.ties):
            raise malformed
        for _, shape, own, dtype, offset in zip(*columns, strict=True):
            if not isinstance(dtype, torch.dtype) or min(offset, *shape, 0) < 0 or offset % ALIGNMENT:
                raise malformed
            if offset + prod(shape) * dtype.itemsize > new.nbytes:
                raise malformed
            if len(own) != len(shape) or _strides(shape, own) != own:
                raise malformed
        return new

    def views(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Return one tensor per entry, without a copy, over a flat buffer ``uint8[nbytes]``; no inference tensors."""
        with torch.inference_mode(False), torch.no_grad():
            return tuple(
                flat[offset : offset + nbytes].view(dtype).as_strided(shape, strides)
                for (offset, nbytes), shape, strides, dtype in zip(
                    self.byte_ranges, self.shapes, self.strides, self.dtypes, strict=True
                )
            )

    @property
    def width(self) -> int:
        """Bytes in a number of the dtype that takes most of the buffer; 8 for wider ones."""
        taken = Counter[int]()
        for (_, nbytes), dtype in zip(self.byte_ranges, self.dtypes, strict=True):
            taken[min(dtype.itemsize, 8)] += nbytes
        return taken.most_common(1)[0][0]

    @cached_property
    def byte_ranges(self) -> tuple[tuple[int, int], ...]:
        """``(offset, size)`` of each entry in the flat buffer, in bytes."""
        entries = zip(self.offsets, self.shapes, self.dtypes, strict=True)
        return tuple((offset, prod(shape) * dtype.itemsize) for offset, shape, dtype in entries)

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """The entries with a place of their own: all but those that are tied to an earlier one."""
        followers = dict(self.ties)
        return tuple(index for index in range(len(self.names)) if index not in followers)

    def check(self, tensors: Sequence[Tensor], receiver: str = "") -> None:
        """Check weights in the order of ``names``, or the tensors of ``receiver``, whose ties may be others.

        LayoutMismatch: names those that have another shape or dtype, or cannot be carried, or be written.
        """
        require_carried(self.names, tensors, receiver)
        problems, cast = list[str](), dict[str, Tensor]()
        for name, one, shape, dtype in zip(self.names, tensors, self.shapes, self.dtypes, strict=True):
            if one.shape != shape or one.dtype is not dtype:
                has = f"it has '{name}' as" if receiver else f"'{name}' is"
                problems.append(f"{has} {_kind(one.shape, one.dtype)}, not {_kind(shape, dtype)}")
                if receiver and one.shape == shape and one.dtype.is_floating_point and dtype.is_floating_point:
                    cast[name] = one
        for follower, leader in () if receiver or problems else self.ties:
            pair = [tensors[follower], tensors[leader]]
            if any(tie_leaders(pair)) and not same_bits(*pair):
                names = f"'{self.names[follower]}' and '{self.names[leader]}'"
                problems.append(f"{names} were one tied tensor, and now differ")
        if problems:
            raise _misfit(problems, receiver, self._cast(cast, tensors) if len(cast) == len(problems) else "")

    def _cast(self, misfits: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> str:
        """Return the transform that gives the misfits their dtypes; "" if one alone does not."""
        dtypes = {one.dtype for one in misfits.values()}
        rest = [one for name, one in zip(self.names, tensors, strict=True) if name not in misfits]
        apart = any(one.is_floating_point() and one.dtype not in dtypes for one in rest)
        if len(dtypes) > 1 or (apart and len(misfits) > _SHOWN):
            return ""
        return f"Cast('{_plain(dtypes.pop())}'{f', only={[*misfits]}' if apart else ''})"

    def order(self, weights: Snapshot, receiver: str = "") -> list[Tensor]:
        """Return weights of the sender, or the tensors of ``receiver``, in the order of this layout.

        LayoutMismatch: names what does not fit.
        """
        own, extra, known = weights.tensors, weights.extra, {*self.names}
        wanting = [name for name in self.names if name not in own]
        more = () if receiver and self.model_may_have_more else own
        surplus = [name for name in more if name not in known and name not in weights.optional]
        found = [f"it has no '{name}'" if receiver else f"missing '{name}'" for name in wanting]
        unknown = "the weights that are sent have no" if receiver else "unknown"
        found += [f"{unknown} '{name}'" for name in surplus]
        if extra is not None and self.extra is not None and extra.keys() != self.extra:
            found.append(f"extra state differs: {describe(sorted(extra.keys() ^ self.extra))}")
        if found:
            remedy = self._renamed(wanting, {name: own[name] for name in surplus}) if receiver and wanting else ""
            raise _misfit(found, receiver, remedy)
        tensors = [own[name] for name in self.names]
        self.check(tensors, receiver)
        if receiver:
            require_apart(dict(zip(self.names, tensors, strict=True)), receiver)
        return tensors

    def _renamed(self, wanting: Sequence[str], surplus: Mapping[str, Tensor]) -> str:
        """Return the transform for a receiver that lacks weights; "" if what else it has is of other shapes."""
        if not surplus:
            return f"Exclude('{wanting[0]}')"
        shapes = {name: shape for name, shape in zip(self.names, self.shapes, strict=True) if name in wanting}
        pairs = [(one, new) for one, shape in shapes.items() for new, own in surplus.items() if own.shape == shape]
        return f"Rename({{'{pairs[0][0]}': '{pairs[0][1]}'}})" if pairs else ""

    def tied_only_in(self, own: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Return the pairs of entries that are one tensor of a receiver, and two in this layout."""
        pairs = [(leader, index) for index, leader in enumerate(tie_leaders(own))]
        return [(leader, index) for leader, index in pairs if self.offsets[leader] != self.offsets[index]]

    def require_same_values(self, pairs: Iterable[tuple[int, int]], views: Sequence[Tensor]) -> None:
        """Raise ``LayoutMismatch`` if entries that are one tensor of a receiver were sent different values."""
        for first, other in pairs:
            if not same_bits(views[first], views[other]):
                raise LayoutMismatch(
                    f"'{self.names[first]}' and '{self.names[other]}' are tied here, but got different values"
                )


def _misfit(problems: Sequence[str], receiver: str, transform: str) -> LayoutMismatch:
    whom = receiver or "the model, or the first ones that were sent"
    unneeded = ", if it does without that weight" if transform.startswith("Exclude") else ""
    remedy = f" (send_transform=wsync.transforms.{transform} would change that{unneeded})" if transform else ""
    return LayoutMismatch(f"the weights do not fit {whom}: {describe(problems)}{remedy}")


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{_plain(dtype)}{list(shape)}"


def _strides(shape: Sequence[int], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor that fills its memory without gap or overlap; for others, contiguous ones."""
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(strides, shape, strict=True) if si != 1):
        if stride != expected:
            return torch.empty(shape, device="meta").stride()
        expected *= size
    return strides


# --- buffers ---


class Buffer(msgspec.Struct, eq=False):
    """A lease on memory for one version: a slot of the arena, or memory of a pool.

    The memory is not reused until the last reference to the buffer is dropped: a reader of its bytes or views keeps it.
    """

    layout: Layout
    flat: Tensor  # all of it, uint8[nbytes]
    views: Sequence[Tensor]  # one tensor per entry of the layout
    slot: int  # its index in the arena, where other processes read it; -1 in private memory
    # The ``native.PackPlan`` of the views; None without the C extension. PyTorch's copy of a small tensor costs more in
    # calls than in bytes; that of a large one first loads the cache lines that it overwrites.
    plan: Any
    formatted: Any = None  # the views as the transports of all workers are given them, once they were

    @classmethod
    def over(cls, layout: Layout, flat: Tensor, slot: int = -1) -> Buffer:
        views = layout.views(flat)
        return cls(layout, flat, views, slot, None if native is None else native.PackPlan(views, slot >= 0))

    @classmethod
    def new(cls, layout: Layout, device: torch.device | str = "cpu") -> Buffer:
        return cls.over(layout, zeros(layout.nbytes, device))

    @property
    def memory(self) -> memoryview:
        """The bytes; of a buffer on a GPU, a copy of them."""
        return self.flat.numpy(force=True).data

    def pack(self, tensors: Any) -> bool:
        """Copy weights into this buffer; False: the module of a ``TensorTree`` has changed, and nothing was copied.

        ``tensors`` are a list in the layout's order, or what ``Source.usual`` returned. LayoutMismatch: no fit.
        """
        filled = False if self.plan is None else self.plan.fill(tensors)
        if filled is not False:
            return filled is True
        given = tensors if isinstance(tensors, list) else tensors.tensors()
        if given is None:
            return False
        self.layout.check(given)  # not plain bytes in main memory: PyTorch would convert what does not fit
        leaders = self.layout.leaders
        copy_all([self.views[i] for i in leaders], [given[i] for i in leaders])
        return True


class BufferPool:
    """Private memory for versions of one layout at a time. A buffer is free while only the pool refers to it."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._layout: Layout | None = None
        self._buffers: list[Buffer] = []

    def reserve(self, layout: Layout) -> Buffer:
        """Return a free buffer. Not thread-safe."""
        if self._layout is not layout:
            self._buffers, self._layout = [], layout
        for index in range(len(self._buffers)):
            if sys.getrefcount(self._buffers[index]) == _POOL_ALONE:
                return self._buffers[index]
        self._buffers.append(Buffer.new(layout, self._device))
        return self._buffers[-1]


def packed(weights: Any) -> tuple[Layout, Buffer]:
    """Return the layout of ``weights`` (a module, a TensorDict or a state dict), and a new buffer with them."""
    given = snapshot(weights)
    layout = Layout.of(given)
    buffer = Buffer.new(layout)
    buffer.pack(layout.order(given))
    return layout, buffer
