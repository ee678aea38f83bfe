"""The flat plan of one model's weights: computed once, then an update is one buffer, packed and viewed by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from wsync.errors import LayoutMismatch
from wsync.loops.tensors import is_sharded, require_whole, tie_leaders
from wsync.weights.overlaps import require_apart
from wsync.weights.snapshot import Snapshot, describe

ALIGNMENT = 64  # bytes: a cache line, and more than any dtype needs

_OPTIONAL = " (a non-persistent buffer, which no state dict has: send the module, or give it to init_on_sender)"


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
        """The plan of ``weights``.

        Raises:
            LayoutMismatch: there is nothing in them; a tensor is sharded, sparse, quantised or without values; or two
                of them overlap partly in one memory.
        """
        names = sorted(weights.tensors, key=lambda name: str(weights.tensors[name].dtype))
        if not names:
            raise LayoutMismatch("these weights are empty: no parameter and no buffer")
        tensors = [weights.tensors[name] for name in names]
        odd = [
            f"'{name}' {defect_of(tensor)}" for name, tensor in zip(names, tensors, strict=True) if defect_of(tensor)
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
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        return cls(
            names=tuple(names),
            shapes=tuple(tensor.shape for tensor in tensors),
            strides=tuple(_strides(tensor) for tensor in tensors),
            dtypes=tuple(tensor.dtype for tensor in tensors),
            offsets=tuple(offsets),
            ties=tuple(ties),
            nbytes=max(end, ALIGNMENT),
            extra=None if weights.extra is None else frozenset(weights.extra),
            optional=weights.optional & frozenset(names),
            model_may_have_more=weights.model_may_have_more,
        )

    def views(self, flat: Tensor) -> tuple[Tensor, ...]:
        """One tensor per entry, without a copy, over a flat buffer ``uint8[nbytes]``.

        Never inference tensors, whatever the caller's mode: autograd may meet them later.
        """
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
        """The tensors of ``weights`` in the order of this layout, checked against it.

        Raises:
            LayoutMismatch: names the missing, unknown, wrongly shaped and wrongly typed keys.
        """
        given = weights.tensors
        if len(given) != len(self.names) or not all(name in given for name in self.names):
            surplus = weights.optional.difference(self.names)
            given = {name: tensor for name, tensor in given.items() if name not in surplus}
            self._check_names(given.keys())
        tensors = [given[name] for name in self.names]
        self.check(tensors)
        if weights.extra is not None and self.extra is not None and weights.extra.keys() != self.extra:
            odd = sorted(weights.extra.keys() ^ self.extra)
            raise LayoutMismatch(f"the weights differ from the first ones in their extra state: {describe(odd)}")
        return tensors

    def check(self, tensors: Sequence[Tensor], receiving: str = "") -> None:
        """Check that ``tensors``, in the order of ``names``, are plain and have the layout's shapes, dtypes and ties.

        Args:
            tensors: weights to be sent, or those of ``receiving``.
            receiving: what receives weights of the layout, for the error; its ties may be others.

        Raises:
            LayoutMismatch: naming each that has not.
        """
        shapes, dtypes = self.shapes, self.dtypes
        fit = shapes == tuple([one.shape for one in tensors]) and dtypes == tuple([one.dtype for one in tensors])
        odd = [i for i, tensor in enumerate(tensors) if defect_of(tensor)]
        if fit and not odd and (receiving or not self.ties):
            return
        if odd:
            require_whole(self.names, tensors, receiving)
        problems = [f"'{self.names[i]}' {defect_of(tensors[i])}" for i in odd]
        problems += [
            f"'{self.names[i]}' is {_kind(tensor.shape, tensor.dtype)}, not {_kind(shapes[i], dtypes[i])}"
            for i, tensor in enumerate(tensors)
            if i not in odd and (tensor.shape != shapes[i] or tensor.dtype is not dtypes[i])
        ]
        problems += [
            f"'{self.names[follower]}' and '{self.names[leader]}' were one tied tensor, and now differ"
            for follower, leader in self.ties
            if not receiving
            and not problems
            and any(tie_leaders([tensors[follower], tensors[leader]]))
            and not same_bits(tensors[follower], tensors[leader])
        ]
        if problems:
            wanted = {one.dtype for one, sent in zip(tensors, dtypes, strict=True) if _casts(sent, one.dtype)}
            raise _mismatch(problems, receiving, cast_to=wanted.pop() if len(wanted) == 1 else None)

    def tied_elsewhere(self, own: Iterable[tuple[Tensor, int]]) -> list[tuple[int, int]]:
        """Return the pairs of entries that have one memory in a receiving model, and two places in this layout.

        Args:
            own: tensors of the model that are copied into, each with the index of its entry.
        """
        first_at: dict[tuple[torch.device, int, int], int] = {}
        pairs: list[tuple[int, int]] = []
        for tensor, index in own:
            if tensor.numel():
                first = first_at.setdefault((tensor.device, tensor.data_ptr(), tensor.numel()), index)
                if self.offsets[first] != self.offsets[index]:
                    pairs.append((first, index))
        return pairs

    def require_same_values(
        self, pairs: Iterable[tuple[int, int]], own: Sequence[Tensor], views: Sequence[Tensor]
    ) -> None:
        """Check that entries that are one tensor in a receiving model were sent the same values.

        Args:
            pairs: pairs of entries.
            own: the model's tensors, in the order of ``names``.
            views: the received values, in the same order.

        Raises:
            LayoutMismatch: two differ; names both.
        """
        for first, other in pairs:
            if not same_bits(_in_memory_order(views[first], own[first]), _in_memory_order(views[other], own[other])):
                raise LayoutMismatch(
                    f"'{self.names[first]}' and '{self.names[other]}' are tied here, but got different values"
                )

    def _check_names(self, given: Collection[str]) -> None:
        names = set(self.names)
        missing = [
            f"missing '{name}'" + (_OPTIONAL if name in self.optional else "")
            for name in self.names
            if name not in given
        ]
        unknown = [f"unknown '{name}'" for name in given if name not in names]
        if missing or unknown:
            raise _mismatch(missing + unknown)


def defect_of(tensor: Tensor) -> str:
    """Why a tensor cannot be carried, for an error message; empty if it can be."""
    if is_sharded(tensor):
        return "is a DTensor; only whole tensors are carried"
    if tensor.is_nested:
        return "is nested; only dense tensors are carried"
    if tensor.layout is not torch.strided:
        return f"is sparse ({str(tensor.layout).removeprefix('torch.')}); only dense tensors are carried"
    if tensor.is_quantized:
        return f"is quantised ({str(tensor.dtype).removeprefix('torch.')}); only plain tensors are carried"
    return "has no values: it is on the meta device" if tensor.is_meta else ""


def _casts(sent: torch.dtype, wanted: torch.dtype) -> bool:
    return sent is not wanted and sent.is_floating_point and wanted.is_floating_point


def _mismatch(problems: Sequence[str], receiving: str = "", cast_to: torch.dtype | None = None) -> LayoutMismatch:
    if receiving:
        name = str(cast_to).removeprefix("torch.")
        remedy = f" (send_transform=wsync.transforms.Cast('{name}') sends weights in {name})" if cast_to else ""
        return LayoutMismatch(f"{receiving} cannot take the weights that are sent: {describe(problems)}{remedy}")
    return LayoutMismatch(f"the weights do not fit the model, or the first ones that were sent: {describe(problems)}")


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are alike, NaNs included."""
    if torch.equal(one, other):
        return True
    return torch.equal(raw_bytes(one), raw_bytes(other))


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, ``uint8[nbytes]``: its own memory if it is contiguous, else a copy."""
    dense = tensor.detach().contiguous()
    # Not reshape(-1): one element is contiguous with any stride, and view(dtype) needs a stride of 1.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _in_memory_order(values: Tensor, own: Tensor) -> Tensor:
    """Return ``values`` in the order in which ``own`` will have them in its memory, of shape ``[n]``."""
    strides = own.stride()
    return values.permute(sorted(range(len(strides)), key=lambda dim: -strides[dim])).reshape(-1)


def _kind(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own strides if it fills its memory without gap or overlap, else contiguous ones."""
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si != 1):
        if stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()
