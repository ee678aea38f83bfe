"""Safetensors files: writing, reading, and their headers, of which everything is checked.

    8 bytes   length of the header, little-endian
    header    JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …, "__metadata__": {…}}
    rest      the tensors, row-major, without gaps

Source: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from os import SEEK_END
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wsync.errors import LayoutMismatch
from wsync.weights.layout import Layout, raw_bytes

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
_SMALL = 64 << 10  # smaller tensors are copied together, to be written by one call


class Entry(NamedTuple):
    """A tensor in a file: what the header has, and where its bytes are, counted from the end of the header."""

    dtype: str
    shape: Sequence[int]
    begin: int
    end: int


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


def check_dtypes(layout: Layout) -> None:
    """Raise ``LayoutMismatch`` if safetensors files cannot have one of the tensors."""
    for name, dtype in zip(layout.names, layout.dtypes, strict=True):
        if dtype not in DTYPES:
            raise LayoutMismatch(f"'{name}' is {dtype}, which a safetensors file cannot have")


def header_entry(layout: Layout, index: int, begin: int) -> dict[str, Any]:
    """Return the field of a header for one tensor; its bytes begin at ``begin``."""
    dtype, shape = DTYPES[layout.dtypes[index]], list(layout.shapes[index])
    offsets = [begin, begin + layout.byte_ranges[index][1]]
    return {layout.names[index]: {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def packed_header(header: Mapping[str, Any]) -> bytes:
    """Return the beginning of a file: the length of its header, and the header."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def dump_tensors(
    layout: Layout, views: Sequence[Tensor], group: Sequence[int], metadata: Mapping[str, str]
) -> list[bytes | memoryview]:
    """Return some tensors of a version as a file, in pieces; the larger ones are not copied.

    Args:
        layout: the layout of the version.
        views: its packed tensors.
        group: which of them.
        metadata: of the file.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for index in group:
        header |= header_entry(layout, index, at)
        at += layout.byte_ranges[index][1]
    pieces: list[bytes | memoryview] = []
    small = bytearray(packed_header(header))
    for index in group:
        content = _bytes_of(views[index])
        if len(content) > _SMALL:
            pieces += [bytes(small), content]
            small.clear()
        else:
            small += content
    return [piece for piece in (*pieces, bytes(small)) if piece]


def _bytes_of(view: Tensor) -> memoryview:
    if not view.numel():
        return memoryview(b"")
    return raw_bytes(view.cpu()).numpy().data


def find_misfit(entries: Mapping[str, Entry], layout: Layout, indices: Mapping[str, int]) -> str:
    """Return what is wrong with the tensors of a file: an unknown name, another shape or dtype; empty if nothing is.

    Args:
        entries: the entries of the file.
        layout: the layout of the version.
        indices: which entries of the layout may be in a file, by name.
    """
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
    size = file.seek(0, SEEK_END) - LENGTH_BYTES
    file.seek(0)
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if length > min(size, LONGEST_HEADER):
        raise ValueError("it is not a safetensors file: it ends within its header")
    entries, _ = parse_header(file.read(length), size - length)
    indices = {layout.names[index]: index for index in layout.leaders}
    misfit = find_misfit(entries, layout, indices)
    missing = sorted(indices.keys() - entries.keys())
    if misfit or missing:
        raise ValueError(f"it has other tensors than its layout: {misfit or f'there is no {missing[0]!r}'}")
    return entries


def read_tensors(
    file: io.RawIOBase | io.BufferedIOBase, layout: Layout, flat: Tensor, entries: Mapping[str, Entry]
) -> None:
    """Read the tensors into a flat buffer ``uint8[nbytes]``. Called once, after ``read_entries`` returned ``entries``.

    Raises:
        ValueError: the file has become shorter.
        OSError: it cannot be read.
    """
    indices, views = {name: index for index, name in enumerate(layout.names)}, layout.views(flat)
    for name in entries:  # in the order of their bytes
        view = views[indices[name]]
        dense = view if view.is_contiguous() else torch.empty(view.shape, dtype=view.dtype)
        rest: Any = raw_bytes(dense).numpy().data if dense.numel() else memoryview(b"")
        while rest:
            count = file.readinto(rest)
            if not count:
                raise ValueError("the file ends within its tensors")
            rest = rest[count:]
        if dense is not view:
            view.copy_(dense)
