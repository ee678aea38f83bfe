"""Safetensors files of packed weights: tied tensors once, each tensor row-major.

    8 bytes   length of the header, little-endian
    header    JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …, "__metadata__": {…}}
    rest      the tensors, without gaps

The library ``safetensors`` writes them. Its readers map a file, and a process that reads a mapped part that was cut off
is killed; or they copy it while no other thread can run. So a file is read here: its header is checked first, and then
each tensor is read into its place.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wsync.errors import LayoutMismatch, missing_extra
from wsync.weights.layout import ALIGNMENT, Layout
from wsync.weights.tensors import raw_bytes

if TYPE_CHECKING:
    from safetensors import TensorSpec

LENGTH_BYTES = 8
"""A file begins with the length of its header, in as many bytes."""
LONGEST_HEADER = 100_000_000
"""Of a file, in bytes; as in the library ``safetensors``."""
DTYPES = {
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
"""Names of dtypes in safetensors files."""


def require_storable(layout: Layout, verb: str) -> None:
    """Check that files can have all tensors of a layout, and that it needs no more memory than they have.

    Args:
        layout: the layout of the weights.
        verb: what cannot be done with extra state, for the error: ``"stored"``.

    Raises:
        LayoutMismatch: it cannot be.
    """
    if layout.extra:
        raise LayoutMismatch(f"extra state cannot be {verb}: {', '.join(sorted(layout.extra))}")
    for name, dtype in zip(layout.names, layout.dtypes, strict=True):
        if dtype not in DTYPES:
            raise LayoutMismatch(f"'{name}' is {dtype}, which a safetensors file cannot have")
    used = sum(-(-layout.byte_ranges[index][1] // ALIGNMENT) * ALIGNMENT for index in layout.leaders)
    if layout.nbytes > max(used, ALIGNMENT):
        raise LayoutMismatch(f"the tensors take {used} bytes, and the buffer has {layout.nbytes}")


# --- writing ---


def dump(tensors: Mapping[str, Tensor]) -> bytes:
    """Return tensors as the content of a file."""
    specs, _memory = _specs(tensors)
    return _library().serialize(specs)


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a local file, which is made, or replaced in place."""
    specs, _memory = _specs(tensors)
    _library().serialize_file(specs, path)


def _specs(tensors: Mapping[str, Tensor]) -> tuple[dict[str, TensorSpec], list[Tensor]]:
    """Return what ``safetensors`` is given, and the memory that it names, which has to exist meanwhile."""
    spec, specs, memory = _library().TensorSpec, dict[str, Any](), list[Tensor]()
    for name, tensor in tensors.items():
        content = raw_bytes(tensor.cpu())
        memory.append(content)
        dtype = str(tensor.dtype).removeprefix("torch.")
        address = content.data_ptr() if len(content) else 0
        specs[name] = spec(dtype=dtype, shape=list(tensor.shape), data_ptr=address, data_len=len(content))
    return specs, memory


def _library() -> Any:
    try:
        import safetensors
    except ModuleNotFoundError as error:
        raise missing_extra(error, "store") from error
    return safetensors


# --- reading ---


def read_entries(file: io.RawIOBase | io.BufferedIOBase, layout: Layout) -> Sequence[str]:
    """Read the header of a file that is open in binary mode; return its tensors in the order of their bytes.

    Raises:
        ValueError: they are not those of ``layout``; or the file is malformed, or too short.
        OSError: it cannot be read.
    """
    size = file.seek(0, os.SEEK_END) - LENGTH_BYTES
    file.seek(0)
    length = int.from_bytes(file.read(LENGTH_BYTES) or b"", "little")
    if length > min(size, LONGEST_HEADER):
        raise ValueError("it is not a safetensors file: it ends within its header")
    try:
        header = json.loads(file.read(length) or b"")
        header.pop("__metadata__", None)
        entries = sorted((*map(_integer, one["data_offsets"]), name) for name, one in header.items())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is not a safetensors file: {type(error).__name__}: {error}") from error
    places, at = {layout.names[index]: index for index in layout.leaders}, 0
    for begin, end, name in entries:
        index, kind = places.pop(name, None), f"{header[name].get('dtype')}{header[name].get('shape')}"
        if index is None:
            raise ValueError(f"'{name}' is not in the layout, or is tied to another tensor, which is stored instead")
        expected = f"{DTYPES[layout.dtypes[index]]}{list(layout.shapes[index])}"
        if kind != expected:
            raise ValueError(f"'{name}' is {kind}, not {expected}")
        if begin != at or end - begin != layout.byte_ranges[index][1]:
            raise ValueError(f"it is not a safetensors file: '{name}' has wrong offsets")
        at = end
    if places or at != size - length:
        lacks = f"it lacks '{min(places)}', and " if places else ""
        raise ValueError(f"{lacks}its tensors end at byte {at} after the header, and it ends at {size - length}")
    return [name for _, _, name in entries]


def _integer(value: object) -> int:
    if type(value) is not int:
        raise TypeError("an offset is no integer")
    return value


def read_tensors(
    file: io.RawIOBase | io.BufferedIOBase, names: Sequence[str], layout: Layout, views: Sequence[Tensor]
) -> None:
    """Read the tensors of a file, whose header ``read_entries`` has read just before, into packed ones.

    Args:
        file: the file.
        names: what ``read_entries`` has returned.
        layout: the layout of the version.
        views: its packed tensors.

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
            count = file.readinto(rest)
            if not count:
                raise ValueError("the file ends within its tensors")
            rest = rest[count:]
        if dense is not view:
            view.copy_(dense)
