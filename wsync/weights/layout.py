"""The flat plan of one model's weights: computed once, then an update is one buffer, packed and viewed by it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import torch
from torch import Tensor

from wsync.errors import LayoutMismatch
from wsync.weights.snapshot import Snapshot
from wsync.weights.tensors import defect_of, describe, require_apart, require_whole, same_bits, tie_leaders

ALIGNMENT = 64  # bytes: a cache line, and more than any dtype needs

_Names, _Numbers = tuple[str, ...], tuple[int, ...]
_Plain = tuple[  # a layout as it travels: its attributes in their order
    _Names,
    tuple[_Numbers, ...],
    tuple[_Numbers, ...],
    _Names,
    _Numbers,
    tuple[tuple[int, int], ...],
    int,
    _Names | None,
    _Names,
    bool,
]


@dataclass(frozen=True)
class Layout:
    """Name, dtype, shape, strides and place of every tensor of a model, in one flat buffer of bytes.

    Entries are ordered by dtype, so that each dtype is one contiguous stretch. Tied tensors share a place.

    Attributes:
        names: dotted names, one per entry.
        shapes, strides, dtypes, offsets: of each entry; strides in elements, offsets in bytes.
        ties: pairs ``(follower, leader)`` of entries that are one tensor.
        nbytes: size of the flat buffer.
        extra: names of the modules' extra states; ``None`` where the first weights could not say.
        optional: entries that later weights may lack (non-persistent buffers of the sender's model).
        model_may_have_more: whether a receiving model may have more weights, which then keep their values.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    ties: tuple[tuple[int, int], ...]
    nbytes: int
    extra: frozenset[str] | None
    optional: frozenset[str]
    model_may_have_more: bool = False

    @classmethod
    def of(cls, weights: Snapshot) -> Layout:
        """Return the plan of ``weights``; LayoutMismatch: they cannot be carried, or there are none."""
        names = sorted(weights.tensors, key=lambda name: str(weights.tensors[name].dtype))
        if not names:
            raise LayoutMismatch("these weights are empty: no parameter and no buffer")
        tensors = [weights.tensors[name] for name in names]
        odd = [
            f"'{name}' {defect}" for name, tensor in zip(names, tensors, strict=True) if (defect := defect_of(tensor))
        ]
        if odd:
            require_whole(names, tensors)
            raise LayoutMismatch(describe(odd))
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
            shapes=tuple(tensor.shape for tensor in tensors),
            strides=tuple(_strides(tensor.shape, tensor.stride()) for tensor in tensors),
            dtypes=tuple(tensor.dtype for tensor in tensors),
            offsets=tuple(offsets),
            ties=tuple(ties),
            nbytes=max(end, ALIGNMENT),
            extra=None if weights.extra is None else frozenset(weights.extra),
            optional=weights.optional & frozenset(names),
            model_may_have_more=weights.model_may_have_more,
        )

    def encode(self) -> bytes:
        """Return the layout as plain data (msgpack). Equal layouts give equal bytes."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["dtypes"] = [_plain(dtype) for dtype in self.dtypes]
        fields["extra"] = None if self.extra is None else sorted(self.extra)
        fields["optional"] = sorted(self.optional)
        return msgspec.msgpack.encode([*fields.values()])

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Layout:
        """Return the layout that ``encode`` gave; ValueError: it is malformed, or does not fit its buffer."""
        names, sizes, strides, kinds, offsets, ties, nbytes, extra, optional, more = msgspec.msgpack.decode(
            data, type=_Plain
        )
        shapes = tuple(torch.Size(size) for size in sizes)
        dtypes: tuple[Any, ...] = tuple(getattr(torch, kind, None) for kind in kinds)
        columns, count = (names, shapes, strides, dtypes, offsets), len(names)
        sound = count and {len(column) for column in columns} == {count} and len({*names}) == count
        sound = sound and all(0 <= leader < index < count for index, leader in ties)
        for _, shape, own, dtype, offset in zip(*columns, strict=False) if sound else ():
            sound = sound and isinstance(dtype, torch.dtype) and min(offset, *shape, 0) >= 0 and not offset % ALIGNMENT
            sound = sound and offset + shape.numel() * dtype.itemsize <= nbytes
            sound = sound and len(own) == len(shape) and _strides(shape, own) == own
        if not sound:
            raise ValueError("a layout that was received is malformed")
        extra = None if extra is None else frozenset(extra)
        return cls(names, shapes, strides, dtypes, offsets, ties, nbytes, extra, frozenset(optional), more)

    def views(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Return one tensor per entry, without a copy, over a flat buffer ``uint8[nbytes]``; no inference tensors."""
        views: list[Tensor] = []
        with torch.inference_mode(False), torch.no_grad():
            for (offset, nbytes), shape, strides, dtype in zip(
                self.byte_ranges, self.shapes, self.strides, self.dtypes, strict=True
            ):
                typed = flat[offset : offset + nbytes].view(dtype) if nbytes else torch.empty(0, dtype=dtype)
                views.append(typed.as_strided(shape, strides) if nbytes else typed.reshape(shape))
        return tuple(views)

    @property
    def width(self) -> int:
        """Bytes in a number of the dtype that takes most of the buffer; 8 for wider ones."""
        sizes = Counter[int]()
        for (_, nbytes), dtype in zip(self.byte_ranges, self.dtypes, strict=True):
            sizes[min(dtype.itemsize, 8)] += nbytes
        return sizes.most_common(1)[0][0]

    @cached_property
    def byte_ranges(self) -> tuple[tuple[int, int], ...]:
        """``(offset, size)`` of each entry in the flat buffer, in bytes."""
        return tuple(
            (offset, shape.numel() * dtype.itemsize)
            for offset, shape, dtype in zip(self.offsets, self.shapes, self.dtypes, strict=True)
        )

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """The entries with a place of their own: all but those that are tied to an earlier one."""
        followers = {follower for follower, _ in self.ties}
        return tuple(index for index in range(len(self.names)) if index not in followers)

    def order(self, weights: Snapshot) -> list[Tensor]:
        """Return the tensors of ``weights`` in the order of this layout; LayoutMismatch: names what does not fit."""
        problems: list[str] = []
        if weights.extra is not None and self.extra is not None and weights.extra.keys() != self.extra:
            problems.append(f"extra state differs: {describe(sorted(weights.extra.keys() ^ self.extra))}")
        return self.fit(weights.tensors, "", optional=weights.optional, problems=problems)

    def check(self, tensors: Sequence[Tensor], receiving: str = "", *, writable: bool = False) -> None:
        """Check weights in the order of ``names``, or the tensors of ``receiving``, whose ties may be others.

        Raises:
            LayoutMismatch: names those that have another shape or dtype, or cannot be carried, or be written.
        """
        shapes, dtypes = self.shapes, self.dtypes
        fit = shapes == tuple([one.shape for one in tensors]) and dtypes == tuple([one.dtype for one in tensors])
        odd = {i: defect for i, one in enumerate(tensors) if (defect := defect_of(one, writable=writable))}
        if fit and not odd and (receiving or not self.ties):
            return
        if odd:
            require_whole(self.names, tensors, receiving)
        problems = [f"'{self.names[i]}' {defect}" for i, defect in odd.items()]
        problems += [
            f"'{self.names[i]}' is {_kind(tensor.shape, tensor.dtype)}, not {_kind(shapes[i], dtypes[i])}"
            for i, tensor in enumerate(tensors)
            if i not in odd and (tensor.shape != shapes[i] or tensor.dtype is not dtypes[i])
        ]
        for follower, leader in () if receiving or problems else self.ties:
            pair = [tensors[follower], tensors[leader]]
            if any(tie_leaders(pair)) and not same_bits(*pair):
                names = f"'{self.names[follower]}' and '{self.names[leader]}'"
                problems.append(f"{names} were one tied tensor, and now differ")
        if problems:
            narrow = [one.dtype for one, dtype in zip(tensors, dtypes, strict=True) if one.dtype is not dtype]
            cast = receiving and narrow and narrow[0].is_floating_point
            raise _misfit(problems, receiving, _by_transform(f"Cast('{_plain(narrow[0])}')") if cast else "")

    def fit(
        self,
        own: Mapping[str, Tensor],
        receiver: str,
        *,
        optional: Collection[str] = (),
        problems: Sequence[str] = (),
        writable: bool = False,
    ) -> list[Tensor]:
        """Return the tensors ``own`` in the order of this layout, checked against it.

        Args:
            own: a receiver's tensors, or weights of the sender.
            receiver: for the error; empty for weights of the sender.
            optional: names of tensors that may be in ``own`` alone.
            problems: what else does not fit.
            writable: whether each tensor is written value by value.
        """
        known, sent = {*self.names}, "the weights that are sent have no" if receiver else "unknown"
        wanting = [name for name in self.names if name not in own]
        more = () if receiver and self.model_may_have_more else own
        surplus = [name for name in more if name not in known and name not in optional]
        found = [f"it has no '{name}'" if receiver else f"missing '{name}'" for name in wanting]
        found += [f"{sent} '{name}'" for name in surplus]
        found += problems
        if found:
            remedy = ""
            if receiver and wanting:
                one = f"Rename({{'{wanting[0]}': '{surplus[0]}'}})" if surplus else f"Exclude('{wanting[0]}')"
                remedy = _by_transform(one)
            raise _misfit(found, receiver, remedy)
        tensors = [own[name] for name in self.names]
        self.check(tensors, receiver, writable=writable)
        if receiver:
            require_apart(dict(zip(self.names, tensors, strict=True)), receiver)
        return tensors

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


def _misfit(problems: Sequence[str], receiver: str = "", remedy: str = "") -> LayoutMismatch:
    whom = receiver or "the model, or the first ones that were sent"
    return LayoutMismatch(f"the weights do not fit {whom}: {describe(problems)}{remedy}")


def _by_transform(transform: str) -> str:
    """Return the remedy for weights that differ in a way that a transform changes."""
    return f" (send_transform=wsync.transforms.{transform} would change that)"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{_plain(dtype)}{list(shape)}"


def _strides(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor that fills its memory without gap or overlap; for others, contiguous ones."""
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(strides, shape, strict=True) if si != 1):
        if stride != expected:
            return torch.empty(shape, device="meta").stride()
        expected *= size
    return strides
