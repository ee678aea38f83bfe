"""Safetensors files of packed weights: tied tensors once, each tensor row-major.

    8 bytes   length of the header, little-endian
    header    JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …}
    rest      the tensors, without gaps

The library ``safetensors`` writes them. Its readers map a file, and a process that reads a mapped part that was cut off
is killed; or they copy it while no other thread can run. So a file is read here: its header is checked first, and then
each tensor is read into its place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import msgspec
import torch
from torch import Tensor

from wsync.errors import LayoutMismatch, missing_extra
from wsync.weights.layout import ALIGNMENT, Layout
from wsync.weights.tensors import raw_bytes

_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000  # as in the library
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
}


class _Entry(msgspec.Struct):
    """One tensor in a header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def require_storable(layout: Layout) -> None:
    """Raise ``LayoutMismatch`` unless files can have all of a layout, and it needs no more memory than they have."""
    if layout.extra:
        raise LayoutMismatch(f"extra state cannot be stored: {', '.join(sorted(layout.extra))}")
    for name, dtype in zip(layout.names, layout.dtypes, strict=True):
        if dtype not in _DTYPES:
            raise LayoutMismatch(f"'{name}' is {dtype}, which a safetensors file cannot have")
    used = sum(-(-layout.byte_ranges[index][1] // ALIGNMENT) * ALIGNMENT for index in layout.leaders)
    if layout.nbytes > max(used, ALIGNMENT):
        raise LayoutMismatch(f"the tensors take {used} bytes, and the buffer has {layout.nbytes}")


def dump(tensors: Mapping[str, Tensor]) -> bytes:
    """Return tensors as the content of a file."""
    try:
        import safetensors
    except ModuleNotFoundError as error:
        raise missing_extra(error, "store") from error
    memory = {name: raw_bytes(tensor.cpu()) for name, tensor in tensors.items()}  # exists as long as it is read
    specs: dict[str, Any] = {
        name: safetensors.TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            data_ptr=memory[name].data_ptr() if tensor.numel() else 0,
            data_len=len(memory[name]),
        )
        for name, tensor in tensors.items()
    }
    return safetensors.serialize(specs)


def read(file: BinaryIO, layout: Layout) -> Sequence[str]:
    """Read the header of a file; return its tensors in the order of their bytes.

    Raises:
        ValueError: they are not those of ``layout``; or the file is malformed, or too short.
        OSError: it cannot be read.
    """
    size = file.seek(0, os.SEEK_END) - _LENGTH_BYTES
    file.seek(0)
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > min(size, _LONGEST_HEADER):
        raise ValueError("it is not a safetensors file: it ends within its header")
    try:
        header = msgspec.json.decode(file.read(length), type=dict[str, _Entry])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it is not a safetensors file: {error}") from error
    places, at = {layout.names[index]: index for index in layout.leaders}, 0
    names = sorted(header, key=lambda name: header[name].data_offsets)
    for name in names:
        index, entry = places.pop(name, None), header[name]
        if index is None:
            raise ValueError(f"'{name}' is not in the layout, or is tied to another tensor, which is stored instead")
        kind, expected = f"{entry.dtype}{entry.shape}", f"{_DTYPES[layout.dtypes[index]]}{list(layout.shapes[index])}"
        if kind != expected:
            raise ValueError(f"'{name}' is {kind}, not {expected}")
        if entry.data_offsets != (at, at := at + layout.byte_ranges[index][1]):
            raise ValueError(f"it is not a safetensors file: '{name}' has wrong offsets")
    if places or at != size - length:
        lacks = f"it lacks '{min(places)}', and " if places else ""
        raise ValueError(f"{lacks}its tensors end at byte {at} after the header, and it ends at {size - length}")
    return names


def read_tensors(file: BinaryIO, names: Sequence[str], layout: Layout, views: Sequence[Tensor]) -> None:
    """Read the tensors of a file, whose header ``read`` has read just before and returned as ``names``.

    Raises:
        ValueError: the file has become shorter.
        OSError: it cannot be read.
    """
    places = dict(zip(layout.names, views, strict=True))
    for name in names:
        view = places[name]
        dense = view if view.is_contiguous() else torch.empty(view.shape, dtype=view.dtype)
        rest: Any = raw_bytes(dense).numpy().data if dense.numel() else memoryview(b"")
        while rest:
            count = file.readinto(rest)  # pyright: ignore[reportAttributeAccessIssue]
            if not count:
                raise ValueError("the file ends within its tensors")
            rest = rest[count:]
        if dense is not view:
            view.copy_(dense)
