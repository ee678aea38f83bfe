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
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from wsync.errors import LayoutMismatch, missing_extra
from wsync.weights.layout import Layout
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


class Entry(NamedTuple):
    """A tensor in a file: what the header has, and where its bytes are, counted from the end of the header."""

    dtype: str
    shape: Sequence[int]
    begin: int
    end: int


def require_storable(layout: Layout, verb: str) -> None:
    """Check that safetensors files can have all tensors of a layout.

    Args:
        layout: the layout of the weights.
        verb: what cannot be done with them otherwise, for the error: ``"stored"``.

    Raises:
        LayoutMismatch: there is extra state, which is pickled; or a tensor has a dtype that such files cannot have.
    """
    if layout.extra:
        raise LayoutMismatch(f"extra state cannot be {verb}: {', '.join(sorted(layout.extra))}")
    for name, dtype in zip(layout.names, layout.dtypes, strict=True):
        if dtype not in DTYPES:
            raise LayoutMismatch(f"'{name}' is {dtype}, which a safetensors file cannot have")


# --- writing ---


def dump(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return tensors as the content of a file."""
    specs, _memory = _specs(tensors)
    return _library().serialize(specs, metadata=None if metadata is None else dict(metadata))


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


def parse_header(text: bytes, size: int) -> tuple[Mapping[str, Entry], Mapping[str, str]]:
    """Return the tensors that a file has, in the order of their bytes, and its metadata.

    Args:
        text: the header, without its length.
        size: the bytes of all tensors, which is the size of the file without the header.

    Raises:
        ValueError: the header is malformed, or its tensors have another size; says why.
    """
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__", {})
        entries = {
            name: Entry(fields["dtype"], fields["shape"], *fields["data_offsets"]) for name, fields in header.items()
        }
        ordered = sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is not a safetensors file: {type(error).__name__}: {error}") from error
    at = 0
    for name, entry in ordered:
        if type(entry.begin) is not int or type(entry.end) is not int or not at == entry.begin <= entry.end:
            raise ValueError(f"it is not a safetensors file: '{name}' has wrong offsets")
        at = entry.end
    if at != size:
        raise ValueError(f"its tensors end at byte {at} after the header, and it ends at {size}")
    if not isinstance(metadata, dict):
        raise ValueError("its metadata is no JSON object")
    return dict(ordered), metadata


def find_misfit(entries: Mapping[str, Entry], layout: Layout, among: Collection[int]) -> str:
    """Return what is wrong with the tensors of a file: an unknown name, another shape or dtype; empty if nothing is.

    Args:
        entries: the tensors of the file.
        layout: the layout of the version.
        among: which tensors of the layout may be in a file.
    """
    indices = {layout.names[index]: index for index in among}
    for name, entry in entries.items():
        index = indices.get(name)
        if index is None:
            return f"'{name}' is not in the layout, or is tied to another tensor, which travels instead"
        dtype, shape = DTYPES.get(layout.dtypes[index]), list(layout.shapes[index])
        if entry.dtype != dtype or entry.shape != shape or entry.end - entry.begin != layout.byte_ranges[index][1]:
            return f"'{name}' is {entry.dtype}{entry.shape}, not {dtype}{shape}"
    return ""


def read_entries(file: io.RawIOBase | io.BufferedIOBase, layout: Layout) -> Mapping[str, Entry]:
    """Read the header of a file that is open in binary mode; return its tensors, which are those of ``layout``.

    Raises:
        ValueError: they are not; or the file is malformed, or too short.
        OSError: it cannot be read.
    """
    size = file.seek(0, os.SEEK_END) - LENGTH_BYTES
    file.seek(0)
    length = int.from_bytes(file.read(LENGTH_BYTES) or b"", "little")
    if length > min(size, LONGEST_HEADER):
        raise ValueError("it is not a safetensors file: it ends within its header")
    entries, _ = parse_header(file.read(length) or b"", size - length)
    misfit = find_misfit(entries, layout, layout.leaders)
    missing = sorted({layout.names[index] for index in layout.leaders} - entries.keys())
    if misfit or missing:
        raise ValueError(f"it has other tensors than its layout: {misfit or f'there is no {missing[0]!r}'}")
    return entries


def read_tensors(
    file: io.RawIOBase | io.BufferedIOBase, entries: Mapping[str, Entry], layout: Layout, views: Sequence[Tensor]
) -> None:
    """Read the tensors of a file, whose header ``read_entries`` has read just before, into packed ones.

    Raises:
        ValueError: the file has become shorter.
        OSError: it cannot be read.
    """
    places = dict(zip(layout.names, views, strict=True))
    for name in entries:  # in the order of their bytes
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
